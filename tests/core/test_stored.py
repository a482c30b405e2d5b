"""Stored models: the bit stream, round trips, hostile folders, expansion into the cache, names on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspine.common import models, stored
from dspine.common.checkpoints import read_header, read_tensor
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.models import find_draft, resolve_model
from dspine.common.quantization import GroupForm, pack_bits, quantize_affine, round_bfloat16, unpack_bits
from dspine.common.stored import expanded_folder, prepare_stored, read_stored, write_stored

FORMS = {"a.experts.gate_up_proj": GroupForm(4, 32), "a.experts.down_proj": GroupForm(5, 16), "b.weight": GroupForm(8, 64)}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {
        "a.experts.gate_up_proj": (3, 4, 64),
        "a.experts.down_proj": (3, 8, 48),
        "b.weight": (8, 128),
        "norm.weight": (7,),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path / "cache"))
    path = write_stored(tmp_path / "tiny", tensors(), FORMS)
    (path / "config.json").write_text('{"model_type": "qwen3_5_moe"}')
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("a card")
    return path


@settings(max_examples=80, deadline=None)
@given(bits=st.integers(2, 8), count=st.integers(1, 70), seed=st.integers(0, 99))
def test_bit_stream(bits: int, count: int, seed: int) -> None:
    """Against Python's own integers: value i in bits i*bits.. of one little-endian number, zero beyond."""
    values = np.random.default_rng(seed).integers(0, 2**bits, (2, count)).astype(np.uint32)
    words = pack_bits(values, bits)
    assert words.shape == (2, -(-count * bits // 32)) and words.dtype == np.uint32
    for row, packed in zip(values, words, strict=True):
        number = sum(int(v) << (i * bits) for i, v in enumerate(row))
        assert int.from_bytes(packed.astype("<u4").tobytes(), "little") == number
    np.testing.assert_array_equal(unpack_bits(words, bits, count), values)


def test_bit_stream_refusals() -> None:
    with pytest.raises(DSpineError, match="cannot pack 16 into 4 bits"):
        pack_bits(np.array([3, 16]), 4)
    with pytest.raises(CheckpointError, match="1 words cannot hold 7 values of 5 bits"):
        unpack_bits(np.zeros((2, 1), dtype=np.uint32), 5, 7)
    for bits, group in ((1, 32), (9, 32), (4, 0)):
        with pytest.raises(CheckpointError, match="expected 2 to 8 bits"):
            GroupForm(bits, group)


def test_round_trip_is_within_a_step(folder) -> None:
    want, got = tensors(), dict(read_stored(folder))
    assert list(got) == list(want)
    np.testing.assert_array_equal(got["norm.weight"], round_bfloat16(want["norm.weight"]))
    for name, form in FORMS.items():
        _, scales, biases = quantize_affine(want[name], form.bits, form.group_size)
        step = np.abs(scales) + (np.abs(biases) + np.abs(scales) * 2**form.bits) * 2**-8
        assert got[name].shape == want[name].shape
        assert (np.abs(got[name] - want[name]) <= step.repeat(form.group_size, axis=-1) + 1e-6).all()
        assert np.abs(got[name] - want[name]).mean() > 0


def test_expanded_folder_is_an_ordinary_one(folder) -> None:
    expanded = prepare_stored(folder)
    assert sorted(p.name for p in expanded.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    entries = read_header(expanded / "model.safetensors")
    for name, array in read_stored(folder):
        assert entries[name].dtype == "BF16"
        np.testing.assert_array_equal(read_tensor(entries[name]), round_bfloat16(array))
    stamp = (expanded / "model.safetensors").stat().st_mtime_ns
    assert prepare_stored(folder) == expanded and (expanded / "model.safetensors").stat().st_mtime_ns == stamp
    (expanded / "model.safetensors").write_bytes(b"cut")
    prepare_stored(folder)
    assert (expanded / "model.safetensors").stat().st_size > 100
    write_stored(folder, tensors(1), FORMS)
    assert expanded_folder(folder) != expanded, "other content, same folder"


def test_names_and_folders_lead_to_the_expanded_folder(folder, monkeypatch) -> None:
    shipped = folder.parent / "shipped"
    (shipped / "tiny-draft").mkdir(parents=True)
    (shipped / "tiny-draft" / "config.json").write_text("{}")
    folder.rename(shipped / "tiny")
    monkeypatch.setattr(models, "checkpoints_folder", lambda: shipped)
    monkeypatch.setattr(models, "SHIPPED_PAIRS", (models.ShippedPair("tiny", "tiny-draft"), models.ShippedPair("lost", "x")))
    expanded = resolve_model("tiny")
    assert expanded == resolve_model(str(shipped / "tiny")) and (expanded / "model.safetensors").is_file()
    for name in ("tiny", str(shipped / "tiny"), str(expanded)):
        assert find_draft("auto", name)[0] == shipped / "tiny-draft"
    with pytest.raises(CheckpointError, match="'lost' shipped with dspine is missing at .*lost: reinstall dspine"):
        resolve_model("lost")


def damage_forms(folder: Path, change) -> None:
    content = json.loads((folder / stored.FORMS).read_text())
    change(content)
    (folder / stored.FORMS).write_text(json.dumps(content))


HOSTILE = {
    "version": (lambda c: c.update(version=2), "version 2, expected 'dspine-stored' version 1"),
    "format": (lambda c: c.update(format="x"), "format 'x'"),
    "no tensors": (lambda c: c.pop("tensors"), "missing or damaged"),
    "tensors a list": (lambda c: c.update(tensors=[1]), "missing or damaged"),
    "bits": (lambda c: c["tensors"]["b.weight"].update(bits=64), "expected 2 to 8 bits"),
    "bits a bool": (lambda c: c["tensors"]["b.weight"].update(bits=True), "missing or damaged"),
    "bits a string": (lambda c: c["tensors"]["b.weight"].update(bits="8"), "missing or damaged"),
    "group zero": (lambda c: c["tensors"]["b.weight"].update(group_size=0), "missing or damaged"),
    "group": (lambda c: c["tensors"]["b.weight"].update(group_size=100), "missing or damaged"),
    "huge": (lambda c: c["tensors"]["b.weight"].update(shape=[2**40, 128]), r"b\.weight: words are U32 \[8, 32\]"),
    "negative": (lambda c: c["tensors"]["b.weight"].update(shape=[-8, 128]), "missing or damaged"),
    "shape": (
        lambda c: c["tensors"]["b.weight"].update(shape=[8, 64]),
        r"b\.weight: words are U32 \[8, 32\], expected U32 \[8, 16\]",
    ),
    "scales": (lambda c: c["tensors"]["b.weight"].update(group_size=32), r"b\.weight: scales are BF16 \[8, 2\], expected"),
    "ghost": (lambda c: c["tensors"].update(ghost=c["tensors"]["b.weight"]), "lacks ghost"),
    "unlisted": (lambda c: c["tensors"].pop("b.weight"), "has dtype U32 and no form"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_forms_are_one_clear_error(folder, case: str) -> None:
    change, message = HOSTILE[case]
    damage_forms(folder, change)
    with pytest.raises(CheckpointError, match=message) as error:
        prepare_stored(folder)
    assert "\n" not in str(error.value)
    assert not expanded_folder(folder).exists()


def test_damaged_files_are_one_clear_error(folder) -> None:
    good = (folder / stored.TENSORS).read_bytes()
    for damage in (b"", good[:7], good[:-3], b"\xff" * 64):
        (folder / stored.TENSORS).write_bytes(damage)
        with pytest.raises(CheckpointError, match="missing or damaged safetensors"):
            list(read_stored(folder))
    (folder / stored.TENSORS).write_bytes(good)
    for text in ("", "{", "[]", "[" * 100_000, "\x00", " " * (2**20 + 1)):
        (folder / stored.FORMS).write_text(text)
        with pytest.raises(CheckpointError, match="missing or damaged"):
            list(read_stored(folder))
    (folder / stored.FORMS).unlink()
    with pytest.raises(CheckpointError, match=r"lacks storage\.json"):
        prepare_stored(folder)


def test_values_that_are_not_finite_are_refused(folder, tmp_path) -> None:
    bad = tensors()
    bad["b.weight"][2, 3] = np.nan
    with pytest.raises(CheckpointError, match=r"b\.weight holds values that are not finite"):
        write_stored(tmp_path / "x", bad, FORMS)
    entry = read_header(folder / stored.TENSORS)["b.weight.scales"]
    raw = bytearray((folder / stored.TENSORS).read_bytes())
    raw[entry.offset : entry.offset + 2] = b"\x80\x7f"  # bfloat16 infinity
    (folder / stored.TENSORS).write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"b\.weight holds values that are not finite; fetch"):
        list(read_stored(folder))
