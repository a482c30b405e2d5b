"""Target adapters over the modules that `mlx_lm.load` returns."""
