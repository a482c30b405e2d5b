"""The MLX runtime: Metal on Macs; also MLX's CPU and CUDA back ends."""
