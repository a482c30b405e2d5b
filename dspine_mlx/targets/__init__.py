"""Target adapters over the modules that `mlx_lm` loads: one class a family where it differs, else the plain decoder."""

from __future__ import annotations

from dspine_mlx.targets.families import GemmaTarget, GraniteTarget
from dspine_mlx.targets.hybrid import HybridTarget
from dspine_mlx.targets.load import load_target, wrap_model
from dspine_mlx.targets.plain import PlainTarget

__all__ = ["GemmaTarget", "GraniteTarget", "HybridTarget", "PlainTarget", "load_target", "wrap_model"]
