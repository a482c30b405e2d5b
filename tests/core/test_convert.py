"""`dspine convert`: forms, bits, what is kept and what is refused. Numbers of a quantised file are MLX's own, see tests/mlx."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from dspine.common.checkpoints import DraftTensors, expected_tensors, read_header, read_tensor
from dspine.common.configs import load_drafter_config
from dspine.common.convert import Scheme, convert_drafter
from dspine.common.errors import CheckpointError, DSpineError
from tests.helpers.checkpoints import two_file_form
from tests.helpers.drafters import KINDS, drafter_folder
from tests.helpers.goldens import golden_folder, golden_target

HEAD = np.random.default_rng(3).normal(size=(40, 64)).astype(np.float32)


def tensors_of(folder):
    config = load_drafter_config(folder)
    reader = DraftTensors(folder, config)
    return config, {name: reader.read(name) for name in expected_tensors(config)}, reader


def stored(path, name):
    return read_tensor(read_header(path)[name])


@pytest.fixture(params=sorted(KINDS))
def source(request, tmp_path):
    wide = {"intermediate_size": 64, "num_attention_heads": 8}
    return drafter_folder(tmp_path / "source", request.param, 5, HEAD, **wide)


@pytest.mark.parametrize(
    "scheme",
    [Scheme(8), Scheme(4), Scheme(4, 32), Scheme(4, 64, mixed=True)],
    ids=lambda s: f"{s.bits}-{s.group_size}-{s.mixed}",
)
def test_quantised_drafters_of_every_kind(source, scheme, tmp_path):
    report = convert_drafter(source, tmp_path / "out", form="mlx", scheme=scheme)
    before, old, _ = tensors_of(source)
    after, new, reader = tensors_of(tmp_path / "out")
    assert (after.method, after.block_size, after.query_rows) == (before.method, before.block_size, before.query_rows)
    assert report.quantised > 10 and report.bytes_after < report.bytes_before and 0 < report.error < 0.2
    for name, array in old.items():
        form = reader.form(name)
        limit = 0.004 if form is None else {8: 0.02, 4: 0.2}[form.bits]
        assert np.linalg.norm(new[name] - array) <= limit * max(np.linalg.norm(array), 1e-9), name
        if form is not None:
            assert form.group_size == scheme.group_size
            assert form.bits == (8 if scheme.mixed and ".mlp." not in name else scheme.bits)
    lines = report.lines()
    assert f"quantised {report.quantised} matrices" in lines[1] and "MB ->" in lines[2]
    again = convert_drafter(tmp_path / "out", tmp_path / "back", form="specforge")
    assert again.quantised == 0
    for name, array in tensors_of(tmp_path / "back")[1].items():
        np.testing.assert_allclose(array, new[name], rtol=0.005, atol=1e-30, err_msg=name)


def test_forms_of_dspine(tmp_path):
    """SpecForge -> two-file -> SpecForge -> MLX keep the codes bit for bit; the basis becomes codes with the target's head."""
    first = golden_folder("dspine", tmp_path)
    codes = stored(first / "model.safetensors", "transfer_codes")
    convert_drafter(first, tmp_path / "two", form="two-file")
    assert "config" in json.loads((tmp_path / "two/config.json").read_text())
    np.testing.assert_array_equal(stored(tmp_path / "two/transfer.safetensors", "codes"), codes)
    convert_drafter(tmp_path / "two", tmp_path / "one", form="specforge")
    assert not (tmp_path / "one/transfer.safetensors").exists()
    convert_drafter(tmp_path / "one", tmp_path / "mlx", form="mlx", scheme=Scheme(8, 32))
    for folder in (tmp_path / "one", tmp_path / "mlx"):
        config, _, reader = tensors_of(folder)
        assert config.method == "dspine"
        np.testing.assert_array_equal(reader.transfer_codes(lambda: None), codes)
    reference = two_file_form(golden_folder("dspine", tmp_path))
    convert_drafter(reference, tmp_path / "again", form="specforge")
    np.testing.assert_array_equal(stored(tmp_path / "again/model.safetensors", "transfer_codes"), codes)


def test_codes_from_the_targets_head(tmp_path):
    from safetensors.numpy import save_file

    from dspine.common.transfer_space import transfer_basis

    folder, head = golden_folder("dspine", tmp_path), golden_target("dspine")["lm_head"]
    tensors = load_file(folder / "model.safetensors")
    basis = transfer_basis(head.astype(np.float64), 16)
    del tensors["transfer_codes"], tensors["transfer_ready"]
    tensors["transfer_eigenvectors"] = np.ascontiguousarray(basis.eigenvectors, dtype=np.float32)
    tensors |= {"transfer_eigenvalues": basis.eigenvalues.astype(np.float32), "transfer_mean": basis.mean.astype(np.float32)}
    save_file(tensors, folder / "model.safetensors")
    target = tmp_path / "target"
    target.mkdir()
    save_file({"lm_head.weight": head}, target / "model.safetensors")
    with pytest.raises(DSpineError, match="name --target"):
        convert_drafter(folder, tmp_path / "a", form="two-file")
    convert_drafter(folder, tmp_path / "b", form="two-file", target=target)
    codes = stored(tmp_path / "b/transfer.safetensors", "codes")
    np.testing.assert_allclose(codes @ codes.T, golden_gram(), atol=2e-5)
    report = convert_drafter(folder, tmp_path / "c", form="mlx", scheme=Scheme(8))
    assert "transfer space kept as its basis" in report.notes
    save_file({"lm_head.weight": head[:, :8].copy()}, target / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no plain LM head \[128, 64\]"):
        convert_drafter(folder, tmp_path / "d", form="specforge", target=target)


def golden_gram():
    from tests.helpers.goldens import golden_arrays

    return golden_arrays("dspine")["transfer_gram"]


def test_speculators_cards_keep_their_meaning(tmp_path):
    """The flat card says what the nested one said: taps, rows, anchored windows."""
    folder = drafter_folder(tmp_path / "s", "dflash", 5, HEAD)
    flat = json.loads((folder / "config.json").read_text())
    layers = {k: v for k, v in flat.items() if k not in ("architectures", "dflash_config", "num_target_layers", "block_size")}
    layers |= {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
    card = {
        "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "transformer_layer_config": layers,
        "draft_vocab_size": 40, "block_size": 5, "mask_token_id": 39, "aux_hidden_state_layer_ids": [2, 3],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(card))
    before = load_drafter_config(folder)
    convert_drafter(folder, tmp_path / "out", form="specforge")
    assert load_drafter_config(tmp_path / "out") == before and before.mask_rules()[0].anchored


@pytest.mark.parametrize(
    "change, words",
    [
        ({"form": "gguf"}, "form must be one of"),
        ({"form": "mlx"}, "the mlx form: use --form mlx with --bits"),
        ({"form": "specforge", "scheme": Scheme(8)}, "the mlx form: use --form mlx with --bits"),
        ({"form": "two-file"}, "is for DSpine drafters"),
    ],
)
def test_requests_that_are_refused(change, words, tmp_path):
    folder = golden_folder("dflash2", tmp_path)
    with pytest.raises(DSpineError, match=words):
        convert_drafter(folder, tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(tmp_path):
    folder = golden_folder("dflash2", tmp_path)
    for out in (folder, folder / "config.json"):
        with pytest.raises(DSpineError, match="is not an empty folder"):
            convert_drafter(folder, out, form="specforge")
    for bits, group in ((3, 64), (8, 48)):
        with pytest.raises(DSpineError, match="expected 4 or 8 bits"):
            Scheme(bits, group)


@pytest.mark.parametrize(
    "quantization, words",
    [
        (None, "has no `quantization`"),
        ({"bits": 8}, "known: mode affine"),
        ({"bits": "8", "group_size": 64}, "known: mode affine"),
        ({"bits": 8, "group_size": 64, "mode": "mxfp4"}, "known: mode affine"),
        ({"bits": 4, "group_size": 64}, "expected .* at 4 bits"),
        ({"bits": 8, "group_size": 32}, "in groups of 32"),
        ({"bits": 9, "group_size": 64}, "2 to 8 bits"),
    ],
)
def test_unknown_quantisation_metadata(quantization, words, tmp_path):
    convert_drafter(golden_folder("dspine", tmp_path), tmp_path / "out", form="mlx", scheme=Scheme(8))
    path = tmp_path / "out/config.json"
    card = json.loads(path.read_text()) | {"quantization": quantization}
    path.write_text(json.dumps({k: v for k, v in card.items() if v is not None}))
    with pytest.raises(CheckpointError, match=words):
        tensors_of(tmp_path / "out")
