"""Gated DeltaNet against code nobody here wrote: transformers' gated delta rule and a whole layer of it, mlx-lm's ops."""

from __future__ import annotations

import numpy as np
import pytest

from dspine.common.gdn import GdnFactors, GdnInputWeights, GdnLayout, gdn_commit, gdn_inputs, gdn_verify
from tests.core.test_gdn import block


def relative(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("form", ["torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"])
@pytest.mark.parametrize("w", [1, 5, 16])
def test_transformers_delta_rule(form, w):
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    arrays = [torch.from_numpy(x) for x in block(w, dtype=np.float32, sizes=(16, 12))]
    q, k, v, log_decay, beta, state = arrays
    out, factors = gdn_verify(*arrays)
    stacked = GdnFactors(*(x[None] for x in (factors.z, factors.k, factors.g)))
    inputs, windows = torch.zeros(1, 2, w, 0), torch.zeros(1, 2, 3, 0)
    after = gdn_commit(state[None].clone(), stacked, windows, inputs, torch.full((2,), w))[0][0]  # it may write in place
    want, last = getattr(modeling, form)(
        q * q.shape[-1] ** 0.5, k, v, log_decay, beta, initial_state=state.transpose(2, 3).contiguous(), output_final_state=True
    )
    assert relative(out, want.numpy()) < 1e-6
    assert relative(after, last.transpose(2, 3).numpy()) < 1e-6


def test_transformers_layer():
    """A whole Qwen3.5 layer over 20 tokens, against rounds that also verify, and drop, tokens of another text."""
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    configuration = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    torch.manual_seed(0)
    config = configuration.Qwen3_5TextConfig(
        hidden_size=32,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    layer = modeling.Qwen3_5GatedDeltaNet(config, 0)
    with torch.no_grad():
        layer.A_log.copy_(torch.tensor([0.05, 0.2, 0.5, 1.0]).log())
        layer.dt_bias.normal_()
    hidden, other = torch.randn(1, 20, 32), torch.randn(1, 20, 32)
    layout = GdnLayout(2, 4, 8, 8)
    weights = GdnInputWeights(layer.conv1d.weight[:, 0], layer.A_log, layer.dt_bias)
    state, window = torch.zeros(1, 1, 4, 8, 8), torch.zeros(1, 1, 3, layout.channels)
    outs, done = [], 0
    with torch.no_grad():
        want = layer(hidden)[0]
        for w, m in ((7, 3), (1, 1), (16, 2), (5, 5), (4, 1), (8, 8)):
            rows = torch.cat([hidden[:, done : done + m], other[:, : w - m]], dim=1)
            projected = layer.in_proj_qkv(rows)
            t = gdn_inputs(projected, window[0], layer.in_proj_a(rows), layer.in_proj_b(rows), weights, layout)
            out, f = gdn_verify(t.q, t.k, t.v, t.log_decay, t.beta, state[0])
            stacked = GdnFactors(f.z[None], f.k[None], f.g[None])
            state, window = gdn_commit(state, stacked, window, projected[None], torch.tensor([m]))
            gate = layer.in_proj_z(rows).reshape(-1, 8)
            outs.append(layer.out_proj(layer.norm(out.reshape(-1, 8), gate).reshape(1, w, -1))[0, :m])
            done += m
    assert done == 20
    assert relative(torch.cat(outs), want.numpy()) < 2e-6


@pytest.mark.parametrize("w", [1, 4, 16])
def test_mlx_lm_ops(w):
    mx = pytest.importorskip("mlx.core")
    gated_delta = pytest.importorskip("mlx_lm.models.gated_delta")
    arrays = [mx.array(x) for x in block(w, dtype=np.float32, sizes=(16, 12))]
    q, k, v, log_decay, beta, state = arrays
    out, factors = gdn_verify(*arrays)
    stacked = GdnFactors(*(x[None] for x in (factors.z, factors.k, factors.g)))
    inputs, windows = mx.zeros((1, 2, w, 1)), mx.zeros((1, 2, 3, 1))
    after = gdn_commit(state[None], stacked, windows, inputs, mx.full((2,), w, dtype=mx.int32))[0][0]
    want, last = gated_delta.gated_delta_ops(q, k, v, mx.exp(log_decay), beta, state)
    assert relative(out, np.array(want)) < 1e-6
    assert relative(after, np.array(last)) < 1e-6


def test_mlx_lm_gates():
    """compute_g returns the decay itself: its logarithm is ours."""
    mx = pytest.importorskip("mlx.core")
    gated_delta = pytest.importorskip("mlx_lm.models.gated_delta")
    rng = np.random.default_rng(0)
    layout = GdnLayout(1, 2, 4, 4)
    a, b, decay_log, bias = (mx.array(rng.normal(size=n).astype(np.float32)) for n in ((1, 3, 2), (1, 3, 2), 2, 2))
    weights = GdnInputWeights(mx.zeros((layout.channels, 4)), decay_log, bias)
    found = gdn_inputs(mx.zeros((1, 3, layout.channels)), mx.zeros((1, 3, layout.channels)), a, b, weights, layout)
    want = np.array(gated_delta.compute_g(decay_log, a, bias))
    np.testing.assert_allclose(np.exp(np.array(found.log_decay)), want, rtol=1e-6)
    np.testing.assert_allclose(np.array(found.beta), np.array(mx.sigmoid(b)), rtol=1e-6)
