"""The forward on CUDA: attention that reads the blocks in place, and CUDA graphs."""
