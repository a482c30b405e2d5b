"""Packed layers that pick their product: the same numbers either way, the table, and the measuring of it."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models.switch_layers import QuantizedSwitchLinear

from dspine.common.cli import main as cli
from dspine.common.decoding import DecodingParams, decode
from dspine.common.errors import BackendError, DSpineError
from dspine_mlx import small_rows
from dspine_mlx import tune as tuning
from dspine_mlx.small_rows import Shape, SmallRowLinear, SmallRowSwitch, Table, load_table, packed_layers, save_table, use_table
from dspine_mlx.targets import load_target, wrap_model
from dspine_mlx.tune import picks_of, tune, tune_folder
from tests.metal_kernels.test_dispatch import as_metal
from tests.mlx.hybrids import hybrid_model
from tests.mlx.toys import save_model, toy_model

DEVICE = "Apple M0 Toy"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path))


def quantised(bits=4, kind="qwen3", **changes):
    """mlx-community's form: a `quantization` entry, groups of 32 so that toys fit; lists of layers for mixed recipes."""
    model, config = toy_model(kind, **changes)
    mixed = bits == "mixed"

    def form(path, layer):
        wide = 6 if "v_proj" in path or "down_proj" in path else 4
        return hasattr(layer, "to_quantized") and (not mixed or {"group_size": 32, "bits": wide})

    nn.quantize(model, 32, 4 if mixed else bits, class_predicate=form)
    mx.eval(model.parameters())
    return model, config | {"quantization": {"group_size": 32, "bits": 4 if mixed else bits}}


def everything(model, picks=1, device=DEVICE):
    """A table that sends every number of rows to the kernels."""
    from importlib.metadata import version

    return Table(device, version("mlx"), {shape.key: list(range(1, 257)) for _, _, shape in packed_layers(model, picks)})


@pytest.mark.parametrize("bits", [4, 6, 8, "mixed"])
def test_a_target_says_the_same_by_kernels(bits):
    """Greedy text of a packed target, drafts included, through the emulated kernels; the modules are other objects."""
    plain = wrap_model(*quantised(bits), name="plain")
    model, config = quantised(bits)
    before = model.model.layers[0].mlp.down_proj
    assert use_table(model, everything(model)) > 20
    assert type(model.model.layers[0].mlp.down_proj) is SmallRowLinear and type(before) is nn.QuantizedLinear
    target = wrap_model(model, config, name="tuned")
    params = DecodingParams(max_tokens=6)
    expected = [event.token for event in decode(plain, None, [3, 5, 7], params)]
    block = mx.array([[4, 9, 1, 30]], dtype=mx.int32)
    with as_metal() as launched:
        assert [event.token for event in decode(target, None, [3, 5, 7], params)] == expected
        assert "quantized_rows" in launched
        caches = [one.make_cache(8) for one in (target, plain)]
        got, want = (one.finish(c, one.begin(c, block), 4).logits for one, c in zip((target, plain), caches, strict=True))
        np.testing.assert_allclose(np.array(got), np.array(want), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_experts_that_are_hit(tokens):
    """SwitchGLU as a whole, with and without its sorting, against mlx-lm's own."""
    plain, _ = hybrid_model("qwen3_5_moe", bits=4)
    model, _ = hybrid_model("qwen3_5_moe", bits=4)
    assert picks_of(model) == 2
    use_table(model, everything(model, 2), 2)
    ours, theirs = (m.language_model.model.layers[0].mlp.switch_mlp for m in (model, plain))
    assert type(ours.up_proj) is SmallRowSwitch
    rng = np.random.default_rng(tokens)
    x = mx.array(rng.normal(size=(1, tokens, 64)).astype(np.float32))
    for k in (2, 8):  # 8 picks of 16 tokens are sorted by mlx-lm first
        picks = mx.array(np.stack([rng.permutation(8)[:k] for _ in range(tokens)])[None].astype(np.int32))
        with as_metal() as launched:
            got = np.array(ours(x, picks))
        assert launched.count("gathered_rows") == 3
        np.testing.assert_allclose(got, np.array(theirs(x, picks)), rtol=1e-4, atol=1e-4)


def test_rows_that_the_table_does_not_name_stay_with_mlx():
    layer = nn.QuantizedLinear(64, 24, bias=True, group_size=32, bits=4)
    layer.bias = mx.arange(24).astype(mx.float32)
    own = SmallRowLinear.over(layer, frozenset([3]))
    with as_metal() as launched:
        for rows in (1, 2, 3, 4):
            x = mx.array(np.random.default_rng(rows).normal(size=(1, rows, 64)).astype(np.float32))
            np.testing.assert_allclose(np.array(own(x)), np.array(layer(x)), rtol=1e-4, atol=1e-4)
    assert launched == ["quantized_rows"]


def test_forms_that_the_kernels_do_not_know_are_left_alone():
    model, _ = quantised(4)
    layer = model.model.layers[0].self_attn.q_proj
    layer.mode = "mxfp4"
    count = use_table(model, everything(model))
    assert type(layer) is type(model.model.layers[0].self_attn.q_proj) is nn.QuantizedLinear
    assert count == sum(isinstance(m, SmallRowLinear) for m in model.modules())
    assert use_table(quantised(4)[0], Table(DEVICE, "0", {})) == 0


# -- the table ---------------------------------------------------------------------------------------------------------------


def test_tables_come_back():
    table = everything(quantised(4)[0])
    assert load_table(DEVICE) == (
        None,
        "not tuned: dspine bench --tune measures which products the small-row kernels make faster",
    )
    path = save_table(table)
    assert load_table(DEVICE) == (table, str(path)) and load_table("Apple M1")[0] is None
    table.mlx = "0.0.1"
    save_table(table)
    assert load_table(DEVICE)[0] is None and "tuned with MLX 0.0.1" in load_table(DEVICE)[1]


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"format": 1}', json.dumps({"format": 2, "device": "x", "mlx": "1", "faster": {}}),
             json.dumps({"format": 1, "device": "x", "mlx": "1", "faster": {"a": ["2"]}})]
)  # fmt: skip
def test_damaged_tables_are_errors(text):
    path = small_rows.table_path(DEVICE)
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(DSpineError, match="dspine bench --tune again"):
        load_table(DEVICE)


def test_tuning_keeps_what_was_faster():
    """A clock of our own: the kernel wins below eight rows, and for experts up to six picks."""
    model, _ = hybrid_model("qwen3_5_moe", bits=4)

    def measure(product):
        out = product()
        kernel = product.__closure__ is not None and any(
            isinstance(cell.cell_contents, SmallRowLinear | SmallRowSwitch) for cell in product.__closure__
        )
        rows = out.shape[1] * (out.shape[2] if len(out.shape) == 5 else 1)
        return (0.5 if rows < 8 else 2.0) if kernel else 1.0

    lines = list(tune(model, device=DEVICE, picks=picks_of(model), measure=measure))
    table = lines[-1][1]
    assert len(lines) == len(table.faster) == len({shape.key for _, _, shape in packed_layers(model, 2)})
    plain = [rows for key, rows in table.faster.items() if "experts" not in key]
    routed = [rows for key, rows in table.faster.items() if "experts" in key]
    assert plain and routed and all(rows == [2, 3, 4, 5, 6, 7] for rows in plain) and all(rows == [4, 6] for rows in routed)
    assert "kernel over library 2:0.50" in lines[0][0]


def test_the_command_fills_the_table_that_loading_reads(monkeypatch, tmp_path, capsys):
    """`dspine bench --tune`, as on a Mac but for the clock; a target loaded after it has the kernels where they won."""
    model, config = quantised()
    folder = save_model(tmp_path / "model", model, config)
    assert type(load_target(folder).model.model.layers[0].mlp.down_proj) is nn.QuantizedLinear
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *device: {"device_name": DEVICE})
    monkeypatch.setattr(tuning, "_ratio", lambda layer, shape, rows, picks, measure: 0.9 if rows in (3, 4) else 0.96)
    monkeypatch.setattr(
        "sys.argv", ["dspine", "bench", "--tune", "--backend", "mlx", "--device", "cpu", "--model", str(folder)]
    )
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    shown = capsys.readouterr()
    assert not leaving.value.code, shown.err
    table, where = load_table(DEVICE)
    assert (
        table is not None and where == str(small_rows.table_path(DEVICE)) and where in "".join((shown.out + shown.err).split())
    )
    assert table.faster and all(rows == [3, 4] for rows in table.faster.values())
    monkeypatch.setattr("dspine_mlx.targets.load.device_name", lambda: "metal")
    layer = load_target(folder).model.model.layers[0].mlp.down_proj
    assert type(layer) is SmallRowLinear and layer.kernel_rows == {3, 4}


def test_tuning_needs_metal(monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    with pytest.raises(BackendError, match="there is no Metal here"):
        tune_folder(Path("nowhere"), print)


def test_shapes_of_layers():
    switch = QuantizedSwitchLinear(64, 32, 6, bias=False, group_size=32, bits=8)
    assert small_rows.shape_of(switch, 4) == Shape(8, 32, 64, 32, "float32", 6, 4)
    assert small_rows.shape_of(nn.Linear(4, 4)) is None
    assert (
        small_rows.shape_of(nn.QuantizedLinear(64, 8, group_size=32, bits=2)).key
        == "64 to 8 at 2 bits in groups of 32, float32"
    )
