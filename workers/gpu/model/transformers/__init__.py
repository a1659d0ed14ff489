"""The forward of a transformers model over the paged KV cache."""
