"""Computes the forward of a decoder with few operations, from the weights of a transformers
model."""
