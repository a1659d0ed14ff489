"""LoRA adapters: low-rank updates of a model's weights, which each request chooses by name."""
