"""Targets as mlx-community ships them: 4, 6 and 8 bits, recipes that mix them, experts too; drafts change nothing."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from dspine.common.decoding import DecodingParams, decode
from dspine_mlx.drafter import load_drafter
from dspine_mlx.targets import load_target
from tests.helpers.drafters import Prompted
from tests.mlx.hybrids import hybrid_model
from tests.mlx.toys import drafter_folder, save_model, toy_model

PROMPT = [3, 5, 7, 11, 13]
COUNT = 48


def save_quantised(folder, kind, bits, dtype=mx.float32):
    """Quantise with mlx's own function and save as mlx_lm.convert does: exceptions of a mixed recipe stand by layer."""
    made = hybrid_model(kind) if kind.startswith("qwen3_5") else toy_model(kind)
    model, config = made
    mixed = bits == "mixed"
    entry = {"group_size": 32, "bits": 4 if mixed else bits, "mode": "affine"}

    def form(path, layer):
        if not hasattr(layer, "to_quantized"):
            return False
        if mixed and ("v_proj" in path or "down_proj" in path):
            entry[path] = {"group_size": 32, "bits": 6}
            return entry[path]
        if mixed and path.endswith("embed_tokens"):
            entry[path] = False  # kept as it is
            return False
        return True

    nn.quantize(model, 32, entry["bits"], class_predicate=form)
    return save_model(folder, model, config | {"quantization": entry}, dtype)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_5_moe"])
@pytest.mark.parametrize("bits", [4, 6, 8, "mixed"])
def test_text_is_mlx_lms(kind, bits, tmp_path):
    folder = save_quantised(tmp_path / "target", kind, bits)
    model, config = load_model(folder)
    text = [int(t) for t, _ in generate_step(mx.array(PROMPT), model, max_tokens=COUNT + 12)]
    target = load_target(folder)
    assert target.info.dtype == "float32" and target.info.quantization
    sizes = {leaf.bits for leaf in target.model.modules() if hasattr(leaf, "bits")}
    assert sizes == ({4, 6} if bits == "mixed" else {bits})
    drafter = load_drafter(drafter_folder(tmp_path / "d", "dspine", 6, target.head_weight()), target)
    params = DecodingParams(max_tokens=COUNT, break_even=0.0, prefill_chunk=3)
    assert [event.token for event in decode(target, None, PROMPT, params)] == text[:COUNT]
    prompted = Prompted(drafter, PROMPT, text, wrong_every=4)
    assert [event.token for event in decode(target, prompted, PROMPT, params)] == text[:COUNT]


def test_scales_stored_in_half_precision_run_wide_on_the_cpu(tmp_path):
    """As most files are: bfloat16 scales. Nothing becomes float16, and the packed words stay as they are."""
    folder = save_quantised(tmp_path / "target", "qwen3", 8, mx.bfloat16)
    target = load_target(folder)
    kinds = {str(array.dtype).rpartition(".")[2] for _, array in tree_flatten(target.model.parameters())}
    assert kinds == {"uint32", "float32" if target.info.device == "cpu" else "bfloat16"} and "8-bit" in target.info.quantization
    assert len([event for event in decode(target, None, PROMPT, DecodingParams(max_tokens=8))]) == 8
