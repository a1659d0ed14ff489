"""Loading a model, its KV cache, and running its forward."""
