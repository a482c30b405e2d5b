"""Fused Triton versions of hot functions of the core: the same files and names as `kernels_metal/`."""
