"""The torch runtime: CUDA, and the CPU."""
