"""Loads a model, allocates its KV cache, and runs its forward."""
