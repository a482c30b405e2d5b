"""What makes training fast must not change it: recomputation, cached features, normalisation, counted work."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dspine.common.errors import DSpineError
from dspine_cuda.training.config import LossSection, complete_fingerprint, parse_train_config
from dspine_cuda.training.flops import document_pairs, layer_weights, peak_flops, step_flops, visible_context
from dspine_cuda.training.loop import Prefetcher, Trainer, train
from dspine_cuda.training.losses import combine
from dspine_cuda.training.masks import dense_mask
from tests.training.models import HIDDEN, features_run, toy_batch, toy_drafter
from tests.training.test_loop import losses, run_of, train_rows
from tests.training.toys import train_settings, write_shards, write_target


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_target(tmp_path / "target")
    write_shards(tmp_path / "data")
    return tmp_path


def one_gradient(place: Path, name: str, **run: object) -> dict[str, torch.Tensor]:
    trainer = Trainer(parse_train_config(run_of(place, name, run=run)))
    prefetch = Prefetcher(trainer.config, trainer.stream, 0, pin=False)
    sums = trainer.forward(prefetch.next()[0])
    prefetch.close()
    combine(sums, sums.totals(), trainer.config.loss, 0.5).backward()
    return {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}


def test_recomputed_activations_give_the_same_gradient(place: Path) -> None:
    kept, again = one_gradient(place, "kept"), one_gradient(place, "again", recompute="mlp")
    assert kept.keys() == again.keys() and "layers.0.mlp.gate_proj.weight" in kept
    for name, gradient in kept.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-8)


def test_cached_features_give_the_same_losses(place: Path, monkeypatch) -> None:
    stop = {"run": {"stop_after": 6}}
    train(parse_train_config(run_of(place, "plain", **stop)))
    data = train_settings(place)["data"] | {"features": "cache", "cache_dir": str(place / "cache")}
    monkeypatch.setattr("dspine_cuda.training.feature_cache.SAVE_EVERY", 1)
    calls: list[int] = []
    original = torch.cat

    def interrupted(tensors, dim=0):  # the second group of rows never arrives
        if len(tensors) == 2 and dim == -1 and tensors[0].dim() == 3 and tensors[0].shape[-1] == 64:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
        return original(tensors, dim=dim)

    with monkeypatch.context() as patch:
        patch.setattr("dspine_cuda.training.feature_cache.torch.cat", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Trainer(parse_train_config(run_of(place, "cached", data=data, **stop)))
    assert '"done": 1' in (place / "cache/features.json").read_text()
    trainer = Trainer(parse_train_config(run_of(place, "cached", data=data, **stop)))
    monkeypatch.setattr(trainer.target, "features", None)  # never asked again
    trainer.run()
    np.testing.assert_allclose(losses(place / "cached"), losses(place / "plain"), rtol=1e-4)
    made = (place / "cache/features.bin").read_bytes()
    for damage in (lambda path: path.unlink(), lambda path: path.write_bytes(made[:100])):  # the note alone is not believed
        damage(place / "cache/features.bin")
        Trainer(parse_train_config(run_of(place, "cached", data=data, **stop)), resume=True)
        assert (place / "cache/features.bin").read_bytes() == made
    note = (place / "cache/features.json").read_text()
    (place / "cache/features.json").write_text(note[:20])
    with pytest.raises(DSpineError, match="features.json: damaged .*; delete it to have it made again"):
        Trainer(parse_train_config(run_of(place, "cached", data=data, **stop)), resume=True)
    (place / "cache/features.json").write_text(note)

    def filled(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", filled, raising=False)  # macOS has none
        with pytest.raises(DSpineError, match="disk full while writing .*features.bin .* data.features=recompute"):
            Trainer(parse_train_config(run_of(place, "late", data=data | {"cache_dir": str(place / "late")})))
    assert not list((place / "late").glob("features.*"))
    other = run_of(place, "other", data=data, model=train_settings(place)["model"] | {"taps": [0, 2]})
    with pytest.raises(DSpineError, match="holds features of another target or data"):
        Trainer(parse_train_config(other))
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    full = run_of(place, "full", data=data | {"cache_dir": str(place / "elsewhere")})
    with pytest.raises(
        DSpineError, match="the features take .* GB free: use another data.cache_dir, or data.features=recompute"
    ):
        Trainer(parse_train_config(full))


def test_normalisation_inside_micro_batches(place: Path) -> None:
    """One micro-batch: the same as over the step. Several: half the forwards, and close by."""
    results = {}
    for name, count, over in (("a", 1, "step"), ("b", 1, "micro_batch"), ("c", 4, "micro_batch"), ("d", 4, "step")):
        optimizer = {"learning_rate": 3e-3, "micro_batches": count, "normalize_over": over}
        trainer = Trainer(parse_train_config(run_of(place, name, run={"stop_after": 3}, optimizer=optimizer)))
        calls, forward = [], trainer.forward.from_states
        trainer.forward.from_states = lambda *a, forward=forward, calls=calls: calls.append(1) or forward(*a)
        trainer.run()
        results[name] = (losses(place / name), len(calls))
    np.testing.assert_allclose(results["b"][0], results["a"][0], rtol=1e-5)
    np.testing.assert_allclose(results["d"][0], results["a"][0], rtol=1e-4)
    np.testing.assert_allclose(results["c"][0], results["a"][0], rtol=0.05)
    assert not np.allclose(results["c"][0], results["a"][0], rtol=1e-6)
    assert (results["b"][1], results["c"][1], results["d"][1]) == (3, 12, 24)


def test_counted_work_equals_what_torch_counts() -> None:
    """Products against torch's own counter (it counts no attention on the CPU), attention against the cells of the mask."""
    model = toy_drafter()
    config = model.config
    batch = toy_batch(model, [3, 6, 11, 18, 19], length=21, rows=2)
    features = torch.randn(2, 21, config.feature_size)
    with FlopCounterMode(display=False) as counter:
        sums = features_run(model, batch, features, LossSection(chunk_rows=1000))
        combine(sums, sums.totals(), LossSection(), 0.5).backward()
    ours = step_flops(config, None, batch, refinement=True, alignment="cosine", cached=True)
    cells = int(dense_mask(config.mask_rules()[0], batch.layout).sum())
    attention = 3 * config.num_layers * 4 * config.num_heads * config.head_dim * cells
    assert counter.get_total_flops() == pytest.approx(ours.drafter + ours.target - attention, rel=0.005)
    assert visible_context(batch) == 2 * (3 + 6 + 11 + 18 + 19) and document_pairs(batch) == 2 * 21 * 22 // 2
    assert layer_weights(HIDDEN, 24, 4, 2, 4) == sum(
        p.numel() for n, p in model.layers[0].named_parameters() if n.endswith("proj.weight")
    )
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


def test_metrics_report_tokens_a_second(place: Path) -> None:
    train(parse_train_config(run_of(place, "run", run={"stop_after": 2})))
    rows = train_rows(place / "run")
    assert all(0 < row["tokens_per_second"] <= row["context_tokens_per_second"] for row in rows)
    assert "mfu" not in rows[0]  # no peak is known for this CPU


def test_layers_without_messages_stay_without(place: Path) -> None:
    model = train_settings(place)["model"] | {"injection_layers": [1]}
    trainer = Trainer(parse_train_config(run_of(place, "late", model=model, run={"stop_after": 3})))
    trainer.run()
    writes = [linear.weight for linear in trainer.model.injection.writes]
    assert not writes[0].any() and bool(writes[1].any())
    for bad, message in (
        ({"injection_layers": [2]}, r"injection_layers must be 0..1, got \[2\]"),
        ({"injection_layers": [0], "injection": False}, "injection_layers needs method dspine with injection"),
    ):
        with pytest.raises(DSpineError, match=message):
            parse_train_config(run_of(place, "bad", model=train_settings(place)["model"] | bad))


def test_going_on_from_a_drafter(place: Path) -> None:
    first = Trainer(parse_train_config(run_of(place, "first", run={"stop_after": 4})))
    first.run()
    folder = place / "first/drafter"
    model = train_settings(place)["model"] | {"start_from": str(folder)}
    second = Trainer(parse_train_config(run_of(place, "second", model=model, run={"stop_after": 1})))
    torch.testing.assert_close(second.model.transfer_codes, first.model.transfer_codes, rtol=1e-5, atol=1e-6)
    for (name, ours), theirs in zip(second.model.named_parameters(), first.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3, msg=name)  # exported in bfloat16
    second.run()
    assert losses(place / "second")[0] < losses(place / "first")[0]
    with pytest.raises(DSpineError, match="another drafter .transfer_rank: 12 there, 10 here"):
        Trainer(parse_train_config(run_of(place, "third", model=model | {"transfer_rank": 10})))


def test_runs_of_an_older_version_resume(place: Path) -> None:
    config = parse_train_config(run_of(place, "run"))
    new = config.fingerprint()
    old = {name: dict(value) if isinstance(value, dict) else value for name, value in new.items()}
    del old["optimizer"]["normalize_over"], old["model"]["injection_layers"]
    assert old != new and complete_fingerprint(old) == new


def test_a_full_disk_while_saving_is_one_line(place: Path, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")

    trainer = Trainer(parse_train_config(run_of(place, "run", run={"stop_after": 1})))
    monkeypatch.setattr("torch.save", full)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(DSpineError, match="disk full while writing .*step-00000001.pt .*run it again with --resume"):
        trainer.run()
    assert not list((place / "run/checkpoints").glob("*"))
