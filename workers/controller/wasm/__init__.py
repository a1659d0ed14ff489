"""Wasm controllers: the sandbox, the ABIs that guests are compiled for, the store of modules."""
