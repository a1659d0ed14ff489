"""The forward of a decoder in few operations, over the weights of a transformers model."""
