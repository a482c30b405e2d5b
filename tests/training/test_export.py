"""Exported folders: read back by the strict loader, quantised copies against mlx."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from dspine.common.checkpoints import DraftTensors, expected_tensors
from dspine.common.configs import load_drafter_config
from dspine.common.errors import DSpineError
from dspine.common.quantization import dequantize_affine, quantize_affine, round_bfloat16
from dspine_cuda.drafter import load_drafter
from dspine_cuda.training.config import parse_train_config
from dspine_cuda.training.export import export_drafter, transfer_space_of
from dspine_cuda.training.initial import drafter_config, initial_model
from dspine_cuda.training.target import load_frozen_target
from tests.training.models import toy_config, toy_head
from tests.training.toys import train_settings, write_target


def random_state(config, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in expected_tensors(config).items()}


@pytest.mark.parametrize("injected", [True, False])
def test_folder_round_trip(tmp_path, injected: bool) -> None:
    config = toy_config(injected=injected, causal=injected)
    state, head = random_state(config), toy_head().numpy()
    space = transfer_space_of(head, 6) if injected else None
    export_drafter(tmp_path, state, config, space.basis if space else None)
    read = load_drafter_config(tmp_path)
    assert read == config
    card = json.loads((tmp_path / "config.json").read_text())
    assert card["rope_theta"] == card["rope_parameters"]["rope_theta"] == 10000.0
    assert card["layer_types"] == ["full_attention"] * 2 and card["is_causal"] is injected
    tensors = DraftTensors(tmp_path, read)
    for name, array in state.items():
        np.testing.assert_array_equal(tensors.read(name), round_bfloat16(array))
    tensors.finish()
    if space is not None:
        np.testing.assert_array_equal(tensors.transfer_codes(lambda: head), space.codes)


def test_refusals(tmp_path) -> None:
    config = toy_config()
    state, basis = random_state(config), transfer_space_of(toy_head().numpy(), 6).basis
    with pytest.raises(DSpineError, match="a transfer basis belongs to a DSpine drafter"):
        export_drafter(tmp_path, state, config, None)
    with pytest.raises(DSpineError, match=r"tensors differ.*norm.weight"):
        export_drafter(tmp_path, {n: a for n, a in state.items() if n != "norm.weight"}, config, basis)
    state["norm.weight"][3] = np.inf
    with pytest.raises(DSpineError, match="norm.weight has shape .* or is not finite"):
        export_drafter(tmp_path, state, config, basis)


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_quantised_weights_are_near(bits: int) -> None:
    weight = np.random.default_rng(1).normal(size=(8, 192)).astype(np.float32)
    weight[0, :64], weight[1, :64] = 0.0, 3.0
    words, scales, biases = quantize_affine(weight, bits)
    assert words.dtype == np.uint32 and words.shape == (8, 192 * bits // 32) and scales.shape == (8, 3)
    back = dequantize_affine(words, scales, biases, bits, 64)
    step = np.abs(scales).repeat(64, axis=1)
    edge = np.abs(biases).repeat(64, axis=1)
    # one step, not half: meeting the edge exactly may cut the far end
    assert (np.abs(back - weight) <= step + (edge + step * 2**bits) * 2**-8 + 1e-6).all()
    with pytest.raises(DSpineError, match="groups of 64"):
        quantize_affine(weight[:, :100], bits)


@pytest.mark.parametrize("bits", [3, 4, 5, 6, 8])
def test_quantised_form_is_mlx_s_own(bits: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    weight = np.random.default_rng(2).normal(size=(16, 128)).astype(np.float32)
    words, scales, biases = quantize_affine(weight, bits)
    ours = mx.dequantize(mx.array(words), mx.array(scales), mx.array(biases), group_size=64, bits=bits)
    np.testing.assert_allclose(np.array(ours), dequantize_affine(words, scales, biases, bits, 64), atol=1e-5)
    theirs = mx.quantize(mx.array(weight), group_size=64, bits=bits)
    again = dequantize_affine(*(np.array(a) for a in theirs), bits, 64)
    # ours rounds scales and biases to bfloat16, as they are stored; a value at the middle of a step may go either way
    limit = np.abs(weight).max() * 2**-7 + np.abs(scales).max()
    np.testing.assert_allclose(np.array(ours), again, atol=limit)


def test_quantised_folder_loads_and_computes(tmp_path) -> None:
    target = load_frozen_target(write_target(tmp_path / "target"), torch.device("cpu"), torch.float32)
    config = parse_train_config(train_settings(tmp_path, model={"head_dim": 16, "intermediate_size": 64, "init": "random"}))
    shape = drafter_config(config, target.shape)
    space = transfer_space_of(target.head_weight(), 12)
    model = initial_model(config, shape, target, space)
    state = {name: p.detach().numpy() for name, p in model.named_parameters()}
    plain = load_drafter(export_drafter(tmp_path / "plain", state, shape, space.basis), target)
    small = load_drafter(export_drafter(tmp_path / "small", state, shape, space.basis, bits=8), target)
    assert small.config.quantization == {"bits": 8, "group_size": 64}
    for name, tensor in plain.model.state_dict().items():
        assert float((small.model.state_dict()[name] - tensor).abs().max()) <= 0.01 * max(1.0, float(tensor.abs().max())), name
    np.testing.assert_array_equal(plain.model.transfer_codes.numpy(), model.transfer_codes.numpy())
