"""`load`, `stream_generate` and `generate` on torch: the Python API of `common/generation.py` with this runtime filled in."""

from __future__ import annotations

from dspine.common.generation import GenerationResult, GenerationStep, generate, stream_generate
from dspine.common.generation import load as load_engine
from dspine.common.protocols import Engine
from dspine_cuda.runtime import RUNTIME

__all__ = ["GenerationResult", "GenerationStep", "generate", "load", "stream_generate"]


def load(model: str = "smollm2", draft_model: str | None = "auto", *, device: str = "auto", dtype: str = "auto") -> Engine:
    """A target and its drafter on torch, ready for `generate` and `stream_generate`.

    model: `smollm2`, a folder or a hub id; draft_model: `auto`, None (plain decoding), a folder or a hub id; device:
    auto, cuda, cuda:N or cpu; dtype: auto, bfloat16 or float32. Errors: `DSpineError`, one line each.
    """
    return load_engine(RUNTIME, model, draft_model, device=device, dtype=dtype)
