"""LoRA adapters: low-rank updates of a model's weights. Each request may choose an adapter by
name."""
