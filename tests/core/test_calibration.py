"""The calibration file: round trip, every mismatch named on both sides, damage, and what `auto` takes and why."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from dspine.common.errors import DSpineError
from dspine.common.protocols import Engine, TargetInfo
from dspine.common.selection.calibration import (
    Calibration,
    calibration_path,
    check_calibration,
    device_class,
    drafter_hash,
    identify,
    load_calibration,
    mismatches,
    target_hash,
)
from dspine.common.selection.choose import choose_policy
from dspine.common.selection.lengths import LengthTables
from tests.helpers.calibrations import calibration

INFO = TargetInfo("toy-35b", "toy_moe", 4, 8, 32, 4096, frozenset(), "bfloat16", "cuda:0", "lean")


@pytest.fixture
def engine(tmp_path) -> Engine:
    """A pair whose drafter folder exists; nothing in it runs."""
    folder = tmp_path / "toy-dspine"
    folder.mkdir()
    (folder / "config.json").write_text('{"block_size": 8}')
    (folder / "model.safetensors").write_bytes(b"weights")
    drafter = SimpleNamespace(config=SimpleNamespace(block_size=8, method="dspine"))
    target = SimpleNamespace(info=INFO)
    return Engine(target, drafter, None, "torch", "asked for", "toy", str(folder), device_class="cuda-nvidia-h200")


def fitting(engine: Engine, **changes) -> Calibration:
    return calibration(8, **changes).model_copy(update={"identity": identify(engine)})


def test_round_trip(tmp_path, engine):
    made = fitting(engine, random=True, seed=3).model_copy(
        update={"figures": {"ece": 0.0123}, "provenance": {"date": "2026-01-01"}}
    )
    path = tmp_path / "c.json"
    made.save(path)
    again = load_calibration(path)
    assert again.identity == made.identity and again.figures == made.figures and again.provenance == made.provenance
    for field in dataclasses.fields(LengthTables):
        left, right = getattr(made.tables(), field.name), getattr(again.tables(), field.name)
        np.testing.assert_allclose(right, left, rtol=1e-8)
    again.save(tmp_path / "d.json")
    assert (tmp_path / "d.json").read_text() == path.read_text(), "saving what was read changes nothing"
    assert path.read_text().count("\n") < 120, "number lists stand on one line"


def test_tables_are_what_the_operations_expect(engine):
    made = fitting(engine)
    tables = made.tables(np.float32)
    assert tables.cost.shape == (9,) and tables.cost.dtype == np.float32
    np.testing.assert_allclose(tables.cost[2:], made.cost.target, rtol=1e-6)
    assert fitting(engine, routed=False).tables().pairs is None


CHANGES = {
    "model_type": ("other_moe", "toy_moe"),
    "target": ("0123456789abcdef", "toy-35b"),
    "drafter": ("0123456789abcdef", "toy-dspine"),
    "runtime": ("mlx", "torch"),
    "device": ("cpu", "cuda-nvidia-h200"),
    "dtype": ("float32", "bfloat16"),
    "block_size": (8, 16),
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_mismatch_names_both_sides(field, engine, tmp_path):
    theirs, ours = CHANGES[field]
    here = identify(engine)
    made = fitting(engine)
    if field == "block_size":
        here = here.model_copy(update={field: 16})
    else:
        made = made.model_copy(update={"identity": here.model_copy(update={field: theirs})})
    assert [m.field for m in mismatches(made, here)] == [field.replace("_", " ")]
    with pytest.raises(DSpineError) as error:
        check_calibration(made, here, tmp_path / "c.json")
    text = str(error.value)
    assert str(theirs) in text and str(ours) in text and "dspine calibrate" in text and "--policy full" in text


def test_names_are_for_people(engine, tmp_path):
    """A renamed folder is the same pair; other weights or another shape are not."""
    here = identify(engine)
    renamed = here.model_copy(update={"target_name": "my-copy", "drafter_name": "another"})
    assert not mismatches(fitting(engine), renamed)
    assert target_hash(INFO) == target_hash(dataclasses.replace(INFO, name="x", device="cpu", dtype="float32"))
    assert target_hash(INFO) != target_hash(dataclasses.replace(INFO, num_layers=5))
    folder = tmp_path / "toy-dspine"
    before = drafter_hash(folder)
    (folder / "model.safetensors").write_bytes(b"Weights")
    assert drafter_hash(folder) != before
    (folder / "README.md").write_text("words")
    assert drafter_hash(folder) != before


def test_device_classes():
    assert device_class("cpu", "") == "cpu"
    assert device_class("cuda", "NVIDIA H200") == "cuda-nvidia-h200"
    assert device_class("metal", "Apple M5 Max") == "metal-apple-m5-max"


def damage(made: Calibration, change) -> str:
    data = json.loads(made.model_dump_json())
    change(data)
    return json.dumps(data)


DAMAGE = {
    "truncated": (lambda text: text[: len(text) // 2], "no JSON"),
    "empty": (lambda text: "", "no JSON"),
    "list": (lambda text: "[1, 2]", "is no calibration"),
    "another file": (lambda text: '{"hidden_size": 3}', "is no calibration"),
    "newer": (lambda text: text.replace('"version":1', '"version":2'), "version 2, this dspine reads version 1"),
    "old": (lambda text: text.replace('"version":1', '"version":0'), "version 0"),
}
FIELDS = {
    "unknown key": (lambda d: d.update(extra=1), "extra"),
    "no cost": (lambda d: d.pop("cost"), "cost"),
    "short cost": (lambda d: d["cost"]["measured"].pop(), "cost"),
    "negative time": (lambda d: d["cost"]["measured"].__setitem__(0, -1.0), "positive"),
    "negative eta": (lambda d: d["cost"].update(expert=-1e-9), "cost.expert"),
    "rate of 0": (lambda d: d.update(rate=0.0), "rate"),
    "falling map": (lambda d: d["acceptance"]["isotonic"][0].__setitem__(0, 1.0), "must not fall"),
    "map above 1": (lambda d: d["acceptance"]["isotonic"][0].__setitem__(-1, 1.5), "0..1"),
    "coefficients": (lambda d: d["acceptance"]["coefficients"].pop(), "6 entries"),
    "lengths": (lambda d: d["cost"]["lengths"].__setitem__(0, 3), "2..8"),
    "pairs": (lambda d: d["routing"]["pairs"].pop(), "9 entries"),
    "columns": (lambda d: d["routing"]["pairs_given"][1].pop(), "columns"),
    "text": (lambda d: d.update(rate="fast"), "rate"),
    "not finite": (lambda d: d["cost"]["measured"].__setitem__(0, float("nan")), "finite"),
}


@pytest.mark.parametrize("kind", [*DAMAGE, *FIELDS])
def test_damaged_files_are_one_clear_line(kind, tmp_path, engine):
    made, path = fitting(engine), tmp_path / "c.json"
    change, words = DAMAGE.get(kind) or FIELDS[kind]
    path.write_text(change(made.model_dump_json()) if kind in DAMAGE else damage(made, change))
    with pytest.raises(DSpineError, match=words) as error:
        load_calibration(path)
    assert "c.json" in str(error.value) and "\n" not in str(error.value)


def test_absent_and_binary_files(tmp_path):
    with pytest.raises(DSpineError, match="cannot be read"):
        load_calibration(tmp_path / "nothing.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DSpineError, match="damaged"):
        load_calibration(tmp_path / "binary.json")


def test_auto_takes_what_fits_and_says_why(engine):
    assert calibration_path(engine).name == "calibration.torch-cuda-nvidia-h200.json"
    choice = choose_policy("auto", engine)
    assert choice.policy.name == "full" and "no calibration.torch-cuda-nvidia-h200.json" in choice.reason
    fitting(engine).save(calibration_path(engine))
    choice = choose_policy("auto", engine)
    assert choice.policy.name == "hybridspec" and "has a router" in choice.reason and choice.path == calibration_path(engine)
    choice = choose_policy("auto", engine, acceptance="rejection")
    assert choice.policy.name == "nominal" and "rejection" in choice.reason
    engine.drafter.config.method = "dspark"
    choice = choose_policy("auto", engine, acceptance="rejection")
    assert choice.policy.name == "full" and "drawn path" in choice.reason
    engine.drafter.config.method = "dspine"
    fitting(engine, routed=False).save(calibration_path(engine))
    choice = choose_policy("auto", engine)
    assert choice.policy.name == "nominal" and "no router" in choice.reason
    calibration_path(engine).write_text("{")
    choice = choose_policy("auto", engine)
    assert choice.policy.name == "full" and "damaged" in choice.reason


def test_auto_with_a_file_of_something_else_is_full_and_a_named_policy_is_an_error(engine):
    calibration(8).save(calibration_path(engine))
    choice = choose_policy("auto", engine)
    assert choice.policy.name == "full" and "does not belong here" in choice.reason
    for text in ("nominal", "hybridspec", "dcut", "evict", "dspark"):
        with pytest.raises(DSpineError, match="does not belong here.*toy.*torch"):
            choose_policy(text, engine)
    with pytest.raises(DSpineError, match="does not belong here"):
        choose_policy("auto", engine, calibration=calibration_path(engine))
    assert choose_policy("full", engine).policy.name == "full"
    assert choose_policy("static:3", engine).policy.name == "static:3"


def test_a_named_file_is_used(engine, tmp_path):
    path = tmp_path / "elsewhere.json"
    fitting(engine).save(path)
    choice = choose_policy("evict", engine, calibration=path)
    assert choice.policy.name == "evict" and choice.path == path and "elsewhere.json" in choice.reason
    with pytest.raises(DSpineError, match="no calibration.torch.* beside the drafter"):
        choose_policy("evict", engine)
    with pytest.raises(DSpineError, match="cannot be read"):
        choose_policy("evict", engine, calibration=tmp_path / "nothing.json")


def test_plain_decoding_needs_no_calibration(engine):
    alone = dataclasses.replace(engine, drafter=None, draft_model=None)
    assert choose_policy("auto", alone).policy.name == "full"
    assert choose_policy("hybridspec", engine, draft=False).policy.name == "full"
    with pytest.raises(DSpineError, match="no drafter"):
        identify(alone)
