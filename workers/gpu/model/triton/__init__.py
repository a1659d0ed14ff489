"""Attention over paged keys and the small operations of a decoder layer, in Triton."""
