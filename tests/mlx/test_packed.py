"""Quantised drafters on MLX: the file is MLX's own form, packed products equal dequantised ones, texts stay the target's."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from dspine.common.checkpoints import DraftTensors
from dspine.common.configs import load_drafter_config
from dspine.common.convert import Scheme, convert_drafter
from dspine.common.protocols import DraftRequest
from dspine_mlx.drafter import load_drafter
from tests.helpers.drafters import Prompted
from tests.mlx.goldens import ids
from tests.mlx.test_generation import PROMPT, tokens_of
from tests.mlx.toys import drafter_folder, toy_target

KINDS = ("dspine", "dflash2", "domino", "dspark-rnn")


@pytest.fixture(scope="module")
def target():
    return toy_target("llama")


def quantised(tmp_path, target, kind, scheme):
    wide = {"intermediate_size": 64, "num_attention_heads": 8}
    folder = drafter_folder(tmp_path / "d", kind, 5, target.head_weight(), **wide)
    convert_drafter(folder, tmp_path / "q", form="mlx", scheme=scheme)
    return tmp_path / "q"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", [Scheme(8, 32), Scheme(4, 32, mixed=True)], ids=str)
def test_packed_equals_dequantised(kind, scheme, target, tmp_path):
    folder = quantised(tmp_path, target, kind, scheme)
    plain, packed = (load_drafter(folder, target, packed=choice) for choice in (False, True))
    mlp, attention = packed.model.layers[0].mlp, packed.model.layers[0].self_attn
    assert isinstance(mlp.up_proj, nn.QuantizedLinear) and mlp.up_proj.bits == scheme.bits
    assert isinstance(attention.q_proj, nn.QuantizedLinear) and attention.q_proj.bits == 8
    assert not isinstance(plain.model.layers[0].mlp.up_proj, nn.QuantizedLinear)
    features = mx.random.normal((1, 12, plain.config.feature_size), key=mx.random.key(0))
    said = []
    for drafter in (plain, packed):
        cache = drafter.make_cache(32)
        drafter.commit(cache, features)
        hidden = drafter.run_block(cache, ids([4]))[0].hidden
        said.append((np.array(hidden), np.array(drafter.propose(cache, ids([4]), DraftRequest()).tokens)))
    np.testing.assert_allclose(said[0][0], said[1][0], atol=2e-4)
    np.testing.assert_array_equal(said[0][1], said[1][1])


def test_the_file_is_mlxs_own_form(target, tmp_path):
    """`mx.dequantize` of the stored words gives what the core's reader gives."""
    folder = quantised(tmp_path, target, "dflash", Scheme(4, 32))
    tensors = DraftTensors(folder, load_drafter_config(folder))
    words, scales, biases = tensors.packed("fc.weight")
    theirs = mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), group_size=32, bits=4)
    np.testing.assert_allclose(np.array(theirs), tensors.read("fc.weight"), atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_q1_activations_keep_the_targets_dtype(dtype, tmp_path):
    target = toy_target("llama")
    target.model.set_dtype(getattr(mx, dtype))
    target.info = target.info.__class__(**{**target.info.__dict__, "dtype": dtype})
    drafter = load_drafter(quantised(tmp_path, target, "dspine", Scheme(8, 32)), target, packed=True)
    cache = drafter.make_cache(32)
    drafter.commit(cache, mx.random.normal((1, 6, drafter.config.feature_size)))
    assert drafter.model.dtype == getattr(mx, dtype)
    assert drafter.run_block(cache, ids([4]))[0].hidden.dtype == getattr(mx, dtype)


def test_s3_text_is_the_targets(target, tmp_path):
    text = tokens_of(target, None, 40)
    drafter = load_drafter(quantised(tmp_path, target, "dspark-gated", Scheme(4, 32)), target, packed=True)
    assert tokens_of(target, Prompted(drafter, PROMPT, text, wrong_every=4), 32) == text[:32]
