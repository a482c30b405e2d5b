"""Whole runs on the toy target: learning, exact resumption, ranks, evaluation by the inference code, the target's forward."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from dspine.common.errors import DSpineError
from dspine.common.protocols import DraftRequest
from dspine_cuda.drafter import load_drafter
from dspine_cuda.training import loop
from dspine_cuda.training.cli import main
from dspine_cuda.training.config import load_train_config, parse_train_config
from dspine_cuda.training.data import export_specforge, load_split
from dspine_cuda.training.devices import own_device
from dspine_cuda.training.evaluate import simulated_acceptance
from dspine_cuda.training.loop import Trainer, train
from dspine_cuda.training.masks import document_mask
from dspine_cuda.training.target import load_frozen_target, target_shape
from tests.training.toys import CARD, train_settings, write_shards, write_target, write_tokenizer


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_target(tmp_path / "target")
    write_shards(tmp_path / "data")
    return tmp_path


def train_rows(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["kind"] == "train"]


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in train_rows(folder)]


def run_of(place: Path, name: str, **sections: dict) -> dict:
    sections["run"] = train_settings(place)["run"] | {"output_dir": str(place / name), "log_every": 1} | sections.get("run", {})
    return train_settings(place, **sections)


LEARNABLE = {"loss": {"alpha": 1.0, "chunk_rows": 50, "alignment_scale": 0.2}}


def test_thirty_steps_lower_the_loss_and_the_drafter_loads(place: Path) -> None:
    sections = LEARNABLE | {"optimizer": {"learning_rate": 1e-2}, "run": {"eval_every": 15, "export_bits": 8}}
    summary = train(parse_train_config(run_of(place, "run", **sections)))
    rows = train_rows(place / "run")
    assert len(rows) == 30 and summary["steps"] == 30 and summary["skipped_steps"] == 0
    assert np.mean([r["ce"] for r in rows[-5:]]) < 0.7 * np.mean([r["ce"] for r in rows[:5]])
    assert {"learning_rate", "beta", "gradient_norm", "blocks_per_second", "refined_ce", "alignment"} <= set(rows[0])
    evaluations = [json.loads(line) for line in (place / "run/metrics.jsonl").read_text().splitlines() if '"eval"' in line]
    assert [e["step"] for e in evaluations] == [15, 30]
    assert summary["acceptance"]["tau"] == pytest.approx(1 + sum(summary["acceptance"]["by_position"]))
    target = load_frozen_target(place / "target", torch.device("cpu"), torch.float32)
    assert load_drafter(Path(summary["drafter"]), target).config.method == "dspine"
    assert main(["eval-draft", summary["drafter"], "--data", str(place / "data"), "--model", str(place / "target"),
                 "--holdout", "8", "--stride", "4", "--dtype", "float32", "--device", "cpu"]) == 0  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_killed_and_resumed_gives_the_same_losses(place: Path, dtype: str) -> None:
    sections = {"run": {"dtype": dtype, "checkpoint_every": 10}, "schedule": {"max_steps": 24, "replacement_layers": 1}}
    train(parse_train_config(run_of(place, "whole", **sections)))
    sections["run"] |= {"stop_after": 14}
    train(parse_train_config(run_of(place, "cut", **sections)))
    (place / "cut/checkpoints/step-00000014.pt").unlink()  # as if killed after step 14: the last checkpoint is of step 10
    with (place / "cut/metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    del sections["run"]["stop_after"]
    settings = parse_train_config(run_of(place, "cut", **sections))
    with pytest.raises(DSpineError, match="already holds a run; continue it with --resume"):
        train(settings)
    train(settings, resume=True)
    assert losses(place / "cut") == losses(place / "whole")
    first, second = (torch.load(place / f"{n}/checkpoints/step-00000024.pt", weights_only=True) for n in ("whole", "cut"))
    for name, master in first["optimizer"]["masters"].items():
        torch.testing.assert_close(second["optimizer"]["masters"][name], master, rtol=0, atol=0)
    assert first["position"] == second["position"]


def test_minutes_become_steps_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of one second a look: the probe fixes a number of steps, leaves no trace, and a resumed run keeps the number."""
    monkeypatch.setattr(loop, "WARM_STEPS", 1)
    monkeypatch.setattr(loop, "TIMED_STEPS", 2)
    ticks = iter(range(10**6))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(ticks)))
    clocked = {"schedule": {"max_steps": None, "max_minutes": 0.25, "replacement_layers": 1}}
    summary = train(parse_train_config(run_of(place, "clocked", **clocked)))
    steps = summary["max_steps"]
    assert 4 < steps < 200 and summary["steps"] == steps
    written = [json.loads(line) for line in (place / "clocked/metrics.jsonl").read_text().splitlines()]
    assert [row["max_steps"] for row in written if row["kind"] == "schedule"] == [steps]
    plain = {"schedule": {"max_steps": steps, "replacement_layers": 1}}
    train(parse_train_config(run_of(place, "plain", **plain)))
    assert losses(place / "clocked") == losses(place / "plain")
    rates = [[row["learning_rate"] for row in train_rows(place / name)] for name in ("clocked", "plain")]
    assert rates[0] == rates[1] and rates[0][-1] < 0.01 * max(rates[0])
    cards = [json.loads((place / name / "drafter/config.json").read_text()) for name in ("clocked", "plain")]
    assert cards[0] == cards[1]

    train(parse_train_config(run_of(place, "cut", run={"stop_after": 3}, **clocked)))
    monkeypatch.setattr(loop, "TIMED_STEPS", 10**6)  # a second probe would never end
    assert train(parse_train_config(run_of(place, "cut", **clocked)), resume=True)["steps"] == steps
    assert losses(place / "cut") == losses(place / "plain")


def test_minutes_that_hold_no_step_and_a_ceiling_of_steps(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "WARM_STEPS", 1)
    monkeypatch.setattr(loop, "TIMED_STEPS", 2)
    with pytest.raises(DSpineError, match="schedule.max_minutes 1e-06 is over before the first step"):
        train(parse_train_config(run_of(place, "none", schedule={"max_steps": None, "max_minutes": 1e-6})))
    assert train(parse_train_config(run_of(place, "few", schedule={"max_steps": 3, "max_minutes": 5.0})))["steps"] == 3


def test_a_time_limit_is_the_calls_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run has its minutes anew."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(ticks)))
    settings = parse_train_config(run_of(place, "run", run={"time_limit_minutes": 0.2}))
    first = train(settings)["steps"]
    assert 0 < first < 30
    assert train(settings, resume=True)["steps"] >= min(30, 2 * first - 2)


def test_the_continuation_example_end_to_end(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`continue.yaml` on the toy: from a bfloat16 drafter, more data behind the old, minutes, 8 bits, the same holdout."""
    first = Trainer(parse_train_config(run_of(place, "first", data=train_settings(place)["data"] | {"holdout": 12})))
    first.run()
    write_shards(place / "more", 10, seed=5)
    monkeypatch.setattr(loop, "WARM_STEPS", 1)
    monkeypatch.setattr(loop, "TIMED_STEPS", 2)
    ticks = iter(range(10**6))
    monkeypatch.setattr(loop.time, "perf_counter", lambda: float(next(ticks)))
    overrides = [f"model.target={place / 'target'}", f"model.start_from={place / 'first/drafter'}", "data.holdout=12"]
    overrides += [f"data.path=[{place / 'data'}, {place / 'more'}]", f"run.output_dir={place / 'second'}"]
    overrides += [f"model.{name}={first.config.model.model_dump(mode='json')[name]}" for name in (
        "num_layers", "block_size", "taps", "mask_token_id", "transfer_rank", "message_size", "top_k")]  # fmt: skip
    overrides += ["data.sequence_length=64", "data.rows_per_step=4", "data.num_anchors=8", "loss.chunk_rows=50"]
    overrides += ["schedule.max_minutes=0.25", "run.log_every=1", "run.eval_stride=4", "run.device=cpu", "run.progress=false"]
    example = Path(__file__).parents[2] / "examples/train_smollm2/continue.yaml"
    second = Trainer(load_train_config(example, overrides))
    assert second.config.run.dtype == "bfloat16" and second.config.run.export_bits == 8
    assert len(second.held_out) == 12 and len(second.train_data) > len(first.train_data)
    for ours, theirs in zip(second.held_out, first.held_out, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    summary = second.run()
    assert 4 < summary["steps"] == summary["max_steps"] < 200
    assert losses(place / "second")[0] < losses(place / "first")[0]
    target = load_frozen_target(place / "target", torch.device("cpu"), torch.float32)
    whole, small = (load_drafter(Path(summary[name]), target) for name in ("drafter", "quantized_drafter"))
    assert small.config.quantization == {"bits": 8, "group_size": 64} and whole.config.quantization is None
    same = dataclasses.replace(small.config, quantization=None)
    assert same == whole.config and summary["quantized_drafter"].endswith("drafter-8bit")


def test_more_data_behind_the_first(place: Path) -> None:
    """The holdout stays; new answers to held-out prompts are not trained on."""
    write_shards(place / "more", conversations=10, seed=5)
    train_one, held_one = load_split([place / "data"], 8)
    train_two, held_two = load_split([place / "data", place / "more"], 8)
    assert [c.tokens.tolist() for c in held_two] == [c.tokens.tolist() for c in held_one] and len(held_two) == 8
    assert len(train_two) == len(train_one) + 20
    shard = dict(np.load(place / "more/toy_1.npz"))
    held = held_one[3]
    tokens = np.concatenate([held.tokens[: held.prompt_length], [7, 8, 9]])
    np.savez(place / "more/toy_1.npz", **shard | {"tokens": tokens, "lengths": np.array([len(tokens)]),
             "prompt_lengths": np.array([held.prompt_length]), "greedy": np.array([True])})  # fmt: skip
    assert len(load_split([place / "data", place / "more"], 8)[0]) == len(train_one) + 10
    both = [str(place / "data"), str(place / "more")]
    summary = train(parse_train_config(run_of(place, "run", data={"path": both}, run={"stop_after": 2})))
    assert summary["steps"] == 2
    for wrong in ([], [both[0], both[0]], [""]):
        with pytest.raises(DSpineError, match="data: path names"):
            parse_train_config(run_of(place, "run", data={"path": wrong}))


def test_resuming_with_other_settings_is_refused(place: Path) -> None:
    train(parse_train_config(run_of(place, "run", run={"stop_after": 2})))
    changed = run_of(place, "run", optimizer={"learning_rate": 1e-3})
    with pytest.raises(DSpineError, match=r"optimizer.learning_rate: 0.003 there, 0.001 now"):
        train(parse_train_config(changed), resume=True)
    path = next((place / "run/checkpoints").glob("*.pt"))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DSpineError, match="not a readable checkpoint"):
        train(parse_train_config(run_of(place, "run")), resume=True)


def test_resuming_on_other_data_is_refused(place: Path) -> None:
    """A shard more, or a changed one, would give other rows in the middle of an epoch; another place or form does not."""
    own = write_shards(place / "own")
    cut = run_of(place, "run", data=train_settings(place)["data"] | {"path": str(own)}, run={"stop_after": 2})
    train(parse_train_config(cut))
    write_shards(place / "more", seed=5)
    (place / "more/toy_0.npz").rename(own / "toy_2.npz")
    with pytest.raises(DSpineError, match=r"run: the data is not that .*data.conversations: 72 there, 112 now"):
        train(parse_train_config(cut), resume=True)
    (own / "toy_2.npz").replace(own / "toy_1.npz")
    with pytest.raises(DSpineError, match=r"the data is not that which the run was begun with .data.digest: "):
        train(parse_train_config(cut), resume=True)
    moved = run_of(place, "run", run={"stop_after": 3})  # the same data elsewhere
    assert train(parse_train_config(moved), resume=True)["steps"] == 3
    export_specforge(place / "data", place / "rows.jsonl", str(place / "target"), as_text=False)
    moved["data"] |= {"path": str(place / "rows.jsonl")}
    moved["run"] |= {"stop_after": 4}
    assert train(parse_train_config(moved), resume=True)["steps"] == 4


def test_micro_batches_change_nothing(place: Path) -> None:
    results = []
    for count in (1, 4):
        sections = {"run": {"stop_after": 4}, "optimizer": {"learning_rate": 3e-3, "micro_batches": count}}
        train(parse_train_config(run_of(place, f"micro{count}", **sections)))
        results.append(losses(place / f"micro{count}"))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4)


def _one_rank(rank: int, port: int, runs: list[tuple[dict, bool]]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    for settings, resume in runs:
        Trainer(parse_train_config(settings), resume).run()
    torch.distributed.destroy_process_group()


def on_two_ranks(*runs: tuple[dict, bool]) -> None:
    """Runs (settings, resume), one after another, on two processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_one_rank, args=(port, list(runs)), nprocs=2)


def checkpoint_of(place: Path, name: str, step: int) -> dict:
    return torch.load(place / f"{name}/checkpoints/step-{step:08d}.pt", weights_only=True)["optimizer"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sharded_ranks_equal_whole_ones_and_either_resumes_the_other(place: Path, dtype: str) -> None:
    """FSDP on two ranks against plain ranks; its checkpoint holds whole tensors, read by one process and by two."""

    def settings(name: str, shard: str, stop: int | None = None) -> dict:
        run = {"dtype": dtype, "checkpoint_every": 4, "stop_after": stop, "shard": shard, "keep_checkpoints": 3}
        rate = {"learning_rate": 3e-3, "micro_batches": 2 if dtype == "float32" else 1}
        return run_of(place, name, run=run, optimizer=rate, schedule={"max_steps": 6, "replacement_layers": 1})

    on_two_ranks(
        (settings("whole", "none"), False),
        (settings("sharded", "fsdp", 4), False),
        (settings("cut", "fsdp", 4), False),
        (settings("cut", "fsdp"), True),
    )
    train(parse_train_config(settings("sharded", "none")), resume=True)
    want = losses(place / "whole")
    np.testing.assert_allclose(losses(place / "sharded")[:4], want[:4], rtol=1e-5)
    np.testing.assert_allclose(losses(place / "cut"), want, rtol=1e-5 if dtype == "float32" else 1e-3)
    np.testing.assert_allclose(
        losses(place / "sharded"), want, rtol=1e-4 if dtype == "float32" else 2e-2
    )  # one rank rounds anew
    norms = [[row["gradient_norm"] for row in train_rows(place / name)] for name in ("whole", "cut")]
    np.testing.assert_allclose(norms[1], norms[0], rtol=1e-4 if dtype == "float32" else 1e-2)  # before clipping hides a scale
    whole, sharded = (checkpoint_of(place, name, 4) for name in ("whole", "sharded"))
    for name, master in whole["masters"].items():
        torch.testing.assert_close(sharded["masters"][name], master, rtol=1e-4, atol=1e-5, msg=name)
    for index, entry in whole["adamw"].items():
        for name, value in entry.items():
            torch.testing.assert_close(sharded["adamw"][index][name], value, rtol=1e-3, atol=1e-6, msg=f"{index} {name}")
    target = load_frozen_target(place / "target", torch.device("cpu"), torch.float32)
    pair = [load_drafter(place / name / "drafter", target).model for name in ("whole", "cut")]
    for (name, ours), theirs in zip(pair[0].named_parameters(), pair[1].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-4, msg=name)


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert str(own_device("auto")) == "cuda" and own_device("cpu").type == "cpu" and not current
    assert str(own_device("cuda:1")) == "cuda:1" and [str(d) for d in current] == ["cuda:1"]
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert str(own_device("auto")) == str(own_device("cuda")) == "cuda:1" and own_device("cpu").type == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(DSpineError, match="would run on GPU 2, but torch sees 2; start no more processes than GPUs"):
        own_device("auto")
    monkeypatch.setenv("LOCAL_RANK", "x")
    with pytest.raises(DSpineError, match="LOCAL_RANK must be a whole number"):
        own_device("auto")


def test_one_process_shards_nothing(place: Path) -> None:
    with pytest.raises(DSpineError, match="run.shard=fsdp needs several processes"):
        Trainer(parse_train_config(run_of(place, "run", run={"shard": "fsdp"})))


def test_two_ranks_equal_one(place: Path) -> None:
    sections = {"run": {"stop_after": 4}}
    train(parse_train_config(run_of(place, "one", **sections)))
    on_two_ranks((run_of(place, "two", **sections), False))
    np.testing.assert_allclose(losses(place / "two"), losses(place / "one"), rtol=1e-4)
    one, two = (torch.load(place / f"{name}/checkpoints/step-00000004.pt", weights_only=True) for name in ("one", "two"))
    for name, state in one["optimizer"]["adamw"].items():  # the first moment: a running mean of the gradients themselves
        torch.testing.assert_close(two["optimizer"]["adamw"][name]["exp_avg"], state["exp_avg"], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ({"method": "dflash"}, {}),
        ({"method": "dflash", "is_causal": True}, {}),
        ({"injection": False}, {}),
        ({"init": "random"}, {"refinement": False}),
        ({}, {"alignment": "token"}),
        ({}, {"alignment": "none", "normalization": "shared"}),
        ({"sliding_layers": [0], "sliding_window": 6}, {}),
    ],
)
def test_every_variant_trains_and_exports(place: Path, model: dict, loss: dict) -> None:
    sections = {"model": train_settings(place)["model"] | model, "loss": {"chunk_rows": 50} | loss, "run": {"stop_after": 2}}
    summary = train(parse_train_config(run_of(place, "run", **sections)))
    target = load_frozen_target(place / "target", torch.device("cpu"), torch.float32)
    drafter = load_drafter(Path(summary["drafter"]), target)
    injected = model.get("method") != "dflash" and model.get("injection", True)
    assert drafter.config.method == ("dspine" if injected else "dflash")
    assert drafter.config.is_causal is (model.get("is_causal", False) if model.get("method") == "dflash" else True)
    assert all(np.isfinite(losses(place / "run")))


def test_simulated_acceptance_equals_drafting_one_anchor_at_a_time(place: Path) -> None:
    """Batched, backwards over one cache, against a fresh cache for every anchor."""
    sections = LEARNABLE | {"optimizer": {"learning_rate": 2e-2}, "schedule": {"max_steps": 15}, "run": {"log_every": 15}}
    settings = run_of(place, "run", **sections, data=train_settings(place)["data"] | {"holdout": 4})
    trainer = Trainer(parse_train_config(settings))
    trainer.run()
    drafter = load_drafter(place / "run/drafter", trainer.target)
    held = trainer.held_out
    exact = simulated_acceptance(drafter, trainer.target, held, exact=True)
    counts, rounds, proposals = np.zeros(4), 0, drafter.config.num_proposals
    for conversation in held:
        tokens = torch.from_numpy(conversation.tokens.astype(np.int64))[None]
        length, anchor = tokens.shape[1], conversation.prompt_length
        mask = document_mask(torch.zeros_like(tokens))
        features, _ = trainer.target.features(tokens, torch.arange(length)[None], mask, drafter.config.target_layer_ids)
        while anchor < length - proposals:
            cache = drafter.make_cache(length)
            drafter.commit(cache, features[:, :anchor])
            drafted = drafter.propose(cache, tokens[:, anchor], DraftRequest()).tokens[0]
            accepted = 0
            while accepted < proposals and drafted[accepted] == tokens[0, anchor + 1 + accepted]:
                counts[accepted] += 1
                accepted += 1
            rounds, anchor = rounds + 1, anchor + accepted + 1
    assert exact.rounds == rounds and exact.exact and exact.greedy_text
    np.testing.assert_allclose(exact.by_position, counts / rounds)
    grid = simulated_acceptance(drafter, trainer.target, held, stride=3)
    assert 1.0 <= grid.tau <= 1 + proposals and not grid.exact
    with pytest.raises(DSpineError, match="no held-out conversation"):
        simulated_acceptance(drafter, trainer.target, [])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_packed_target_equals_transformers_one_document_at_a_time(tmp_path: Path, family: str) -> None:
    transformers = pytest.importorskip("transformers")
    folder = write_target(tmp_path / "target")
    if family == "qwen3":
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / "model.safetensors")
        for i in range(4):
            for name in ("q_norm", "k_norm"):
                weights[f"model.layers.{i}.self_attn.{name}.weight"] = 1 + 0.3 * torch.randn(8)
        save_file(weights, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(CARD | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    target = load_frozen_target(folder, torch.device("cpu"), torch.float32)
    lengths, tokens = (7, 9), torch.randint(90, (1, 16), generator=torch.Generator().manual_seed(0))
    documents = torch.tensor([[0] * 7 + [1] * 9])
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    features, last = target.features(tokens, positions, document_mask(documents), (1, 3))
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        with torch.no_grad():
            output = reference(tokens[:, part], output_hidden_states=True)
        torch.testing.assert_close(target.head(last[:, part]), output.logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(features[:, part, :32], output.hidden_states[2], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last[:, part], output.hidden_states[4], rtol=1e-4, atol=1e-4)
        start += length


def test_unfit_targets_and_shapes_are_refused(place: Path) -> None:
    (place / "odd").mkdir()
    (place / "odd/config.json").write_text(json.dumps(CARD | {"model_type": "gpt2"}))
    with pytest.raises(DSpineError, match="cannot train for a target of type 'gpt2'; known: llama, qwen3"):
        target_shape(place / "odd")
    for model, message in (
        ({"taps": [1, 9]}, r"model.taps \[9\] out of range: the target has layers 0..3"),
        ({"mask_token_id": 96}, "mask_token_id 96 is not below the target's vocabulary 96"),
        ({"transfer_rank": 40}, "transfer_rank 40 is above the target's hidden size 32"),
        ({"num_layers": 5}, "use model.init=random"),
    ):
        settings = train_settings(place, model=train_settings(place)["model"] | model)
        with pytest.raises(DSpineError, match=message):
            Trainer(parse_train_config(settings))


def test_the_mask_token_is_chosen(place: Path) -> None:
    """The tokenizer's own, an id behind its words, or one that the data never uses."""
    model = {"mask_token_id": None}

    def chosen(name: str) -> int:
        return Trainer(parse_train_config(run_of(place, name, model=model))).shape.mask_token_id

    for path in (place / "data").glob("*.npz"):
        shard = dict(np.load(path))
        shard["tokens"] = np.where(np.isin(shard["tokens"], [0, 1, 2, 3, 80, 90]), 50, shard["tokens"])
        np.savez(path, **shard)
    assert chosen("unused") == 90
    write_tokenizer(place / "target")  # knows all 96 words, four of them special
    assert chosen("words") == 90
    card = json.loads((place / "target/tokenizer_config.json").read_text())
    (place / "target/tokenizer_config.json").write_text(json.dumps(card | {"mask_token": "w9"}))
    assert chosen("own") == 9


def test_data_of_another_tokenizer_is_refused(place: Path) -> None:
    shard = dict(np.load(place / "data/toy_0.npz"))
    shard["tokens"] = shard["tokens"] + 60
    np.savez(place / "data/toy_0.npz", **shard)
    with pytest.raises(DSpineError, match="outside the target's vocabulary of 96: the data was made with another tokenizer"):
        Trainer(parse_train_config(run_of(place, "run")))
