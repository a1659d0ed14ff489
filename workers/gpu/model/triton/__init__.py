"""Attention over the blocks of the KV cache and the small operations of a decoder layer, in
Triton."""
