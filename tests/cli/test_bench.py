"""`dspine bench`: reports of toy pairs and of tiny random checkpoints, traces, replay, bad input. No timing is asserted."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dspine.common.bench import floors
from dspine.common.bench.contenders import LengthRounds, LoopContender, Task, TracePolicy
from dspine.common.bench.presets import cut_layers, find_preset, plain_drafter, preset_names
from dspine.common.bench.random_weights import preset_folders, write_random
from dspine.common.bench.run import _chosen
from dspine.common.bench.shapes import target_tensors
from dspine.common.bench.timing import PHASES, HostTimer, PhaseRecorder
from dspine.common.bench.trace import SHIPPED, Trace, load_trace, save_trace
from dspine.common.checkpoints import expected_tensors, read_header, read_tensor
from dspine.common.cli.bench import BenchOptions, build_settings, parse_lengths
from dspine.common.configs import parse_drafter_config
from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.memory import plan_memory
from dspine.common.selection.policies import StaticPolicy
from tests.helpers.toys import ToyTarget, markov_logits, oracle_drafter

PROMPT = [3, 5, 7]
QUICK = ("--tokens", "12", "--repetitions", "1", "--prompts", "1")
RUNTIMES = [
    pytest.param("torch", marks=pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")),
    pytest.param("mlx", marks=pytest.mark.skipif(not importlib.util.find_spec("mlx_lm"), reason="mlx-lm is not installed")),
]


@pytest.fixture
def small_array(monkeypatch):
    """The bandwidth's array is a few kilobytes here."""
    real = floors.measure_bandwidth

    def small(arrays, timer, *, nbytes, repetitions=2):
        return real(arrays, timer, nbytes=4096, repetitions=repetitions)

    monkeypatch.setattr("dspine.common.bench.run.measure_bandwidth", small)


@pytest.fixture
def toy_pair():
    target = ToyTarget(markov_logits(16, 1), 16)
    return target, oracle_drafter(target.logits_of, PROMPT, 8, wrong_every=5)


def written_trace(path: Path, rounds: list[tuple[int, int]], block: int = 8) -> Path:
    save_trace(path, block, rounds, {"model": "m", "drafter": "d"})
    return path


def test_toy_pair_gives_a_whole_report_and_a_trace(toy, dspine, small_array, tmp_path):
    trace, out = tmp_path / "trace.json", tmp_path / "report.json"
    made = dspine(
        "bench", "--backend", "toy", "--model", toy / "model", "--draft-model", toy / "draft", *QUICK, "--context", "8",
        "--lengths", "1,2,4", "--record-trace", trace, "--out", out, "--json",
    )  # fmt: skip
    assert made.code == 0, made.err
    report = json.loads(made.out)
    assert report == json.loads(out.read_text())
    (row,) = report["contenders"]
    assert row["same_text"] == 1.0 and not report["replayed"] and "REPLAYED" not in made.err
    assert [item["length"] for item in row["lengths"]] == [1, 2, 4]
    assert set(row["phases"]["speculative"]) <= set(PHASES) and {"draft", "stage 1", "accept"} <= set(
        row["phases"]["speculative"]
    )
    assert "draft" not in row["phases"]["plain"] and "stage 1" in row["phases"]["plain"]
    assert report["setup"]["policy"] == "full" and {"commit", "machine", "versions", "command"} <= set(report)
    read = load_trace(trace)
    assert read.block_size == 8 and read.rounds and read.source["policy"] == "full"


@pytest.mark.parametrize("backend", RUNTIMES)
@pytest.mark.parametrize("preset", ["toy-dense", "toy-hybrid"])
def test_random_weights_replay_a_trace(dspine, small_array, tmp_path, monkeypatch, backend, preset):
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path / "cache"))
    trace = written_trace(tmp_path / "trace.json", [(8, 3), (8, 0), (4, 2)])
    layers = ("--layers", "4") if preset == "toy-hybrid" else ()
    made = dspine(
        "bench", "--backend", backend, "--device", "cpu", "--random-weights", preset, *layers, "--trace", trace, *QUICK,
        "--context", "9", "--lengths", "1,3", "--json",
    )  # fmt: skip
    assert made.code == 0, made.err
    report = json.loads(made.out)
    row = report["contenders"][0]
    assert report["replayed"] and "REPLAYED" in report["acceptance"] and "REPLAYED" in made.err and "RANDOM weights" in made.err
    assert report["setup"]["random_weights"] and row["speculative"]["acceptance_length"] == pytest.approx(11 / 4)
    assert "same_text" not in row  # a replayed text means nothing
    bytes_read = [item["bytes"] for item in report["floors"]["lengths"]]
    if preset == "toy-hybrid":
        hit = [item["experts_hit"] for item in report["floors"]["lengths"]]
        assert report["floors"]["experts"] == "counted" and hit[0] == 2 <= hit[1] <= 6 and bytes_read[0] <= bytes_read[1]
    else:
        assert bytes_read[0] == bytes_read[1]


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_full_verification_stands_beside_a_traced_policy(dspine, small_array, tmp_path, monkeypatch):
    """Lengths and acceptance of one trace, acceptance of the whole blocks from another; phases of the commonest length."""
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path / "cache"))
    trace, whole = (
        written_trace(tmp_path / name, rounds) for name, rounds in (("t.json", [(3, 2), (2, 1), (3, 0)]), ("f.json", [(8, 5)]))
    )
    made = dspine(
        "bench", "--backend", "torch", "--device", "cpu", "--random-weights", "toy-hybrid", "--layers", "4", "--trace", trace,
        "--full-trace", whole, "--policy", "trace", "--tokens", "25", "--repetitions", "2", "--prompts", "1", "--context", "9",
        "--parts", "speed,phases", "--json",
    )  # fmt: skip
    assert made.code == 0, made.err
    report = json.loads(made.out)
    (row,) = report["contenders"]
    assert report["setup"]["policy"] == "trace" and "f.json" in report["full_acceptance"] and report["complete"]
    assert row["full"]["acceptance_length"] == 6 and row["full"]["verified"]["rounds"] == {"12": 2, "16": 4}
    assert row["speculative"]["acceptance_length"] == 2 and row["speculative"]["verified"]["rounds"] == {"2": 8, "3": 14}
    assert row["speculative"]["verified"]["mean"] == pytest.approx((2 * 8 + 3 * 14) / 22)
    assert row["over_full"] == row["speculative"]["tokens_per_second"] / row["full"]["tokens_per_second"]
    assert row["phases_length"] == 3 and row["lengths"] == [] and report["floors"]["lengths"] == []
    assert "2.64 (2)" in made.err and "phases of a round of 3 tokens" in made.err


def test_a_run_that_is_cut_keeps_what_it_measured(toy, dspine, small_array, tmp_path, monkeypatch):
    """--out is whole JSON after every step, and the steps stand on stderr with their seconds."""
    pair = ("--backend", "toy", "--model", toy / "model", "--draft-model", toy / "draft", *QUICK, "--context", "8")

    def cut(self, task):
        raise DSpineError("cut here")

    monkeypatch.setattr(LoopContender, "phases", cut)
    made = dspine("bench", *pair, "--policy", "static:3", "--out", tmp_path / "report.json")
    assert made.code == 2 and "cut here" in made.err and " s  end to end, repetition 1 of 1" in made.err
    report = json.loads((tmp_path / "report.json").read_text())
    (row,) = report["contenders"]
    assert not report["complete"] and set(row["speculative"]["verified"]["rounds"]) <= {"1", "2", "3"} and row["over_full"] > 0
    assert row["full"]["same_text"] == row["speculative"]["same_text"] == 1.0 and row["phases"] == {}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("report")] == ["report.json"]
    whole = dspine("bench", *pair, "--parts", "speed", "--json")
    assert whole.code == 0 and "full" not in json.loads(whole.out)["contenders"][0] and "by length" not in whole.err
    made = dspine("bench", *pair, "--parts", "speed", "--out", tmp_path / "nowhere" / "report.json")
    assert made.code == 2 and "cannot be written" in made.err


def test_prompts_of_a_file(toy, dspine, small_array, tmp_path):
    pair = ("--backend", "toy", "--model", toy / "model", "--draft-model", toy / "draft", *QUICK, "--parts", "speed", "--json")
    (tmp_path / "p.txt").write_text("ab\nabc\nab ab ab ab\n")
    made = dspine("bench", *pair, "--prompt-file", tmp_path / "p.txt", "--prompts", "3")
    assert made.code == 0, made.err
    assert len(json.loads(made.out)["setup"]["context"]) == 3
    made = dspine("bench", *pair, "--prompt-file", tmp_path / "p.txt", "--prompts", "5")
    assert made.code == 2 and "holds 3; take fewer" in made.err


def test_contenders_that_only_chosen_lengths_tell_apart():
    class Named:
        def __init__(self, name, chosen=False):
            self.name, self.for_chosen_lengths = name, chosen

    found = [Named("loop"), Named("graphs"), Named("graphs-read", True)]

    def names(only, policy):
        return [contender.name for contender in _chosen(found, only, policy)]

    assert names((), StaticPolicy()) == names((), StaticPolicy(4)) == ["loop", "graphs"]
    assert names((), TracePolicy(Trace(8, ((3, 2),)))) == ["loop", "graphs", "graphs-read"]
    assert names(("graphs-read", "graphs"), StaticPolicy()) == ["graphs", "graphs-read"]
    with pytest.raises(DSpineError, match="--only read: not here; .* has loop, graphs, graphs-read"):
        names(("read",), StaticPolicy())


def test_replay_commits_what_the_trace_says_and_keeps_the_caches(toy_pair):
    target, drafter = toy_pair
    contender = LoopContender(target, drafter, HostTimer())
    run = contender.run(Task(PROMPT, 20, True, (3, 0, 5)))
    assert run.rounds[:4] == [(8, 3), (8, 0), (8, 5), (8, 3)] and len(run.token_ids) == 20
    plain = contender.run(Task(PROMPT, 20, False))
    own = contender.run(Task(PROMPT, 20, True))
    assert own.token_ids == plain.token_ids and run.token_ids != plain.token_ids
    assert plain.round_count == 19 and own.round_count < 19


def test_replay_accepts_no_more_than_was_verified(toy_pair):
    target, drafter = toy_pair
    trace = Trace(8, ((3, 2), (2, 1), (8, 6)))
    policy = TracePolicy(trace)
    replay = tuple(accepted for _, accepted in trace.rounds)
    run = LoopContender(target, drafter, HostTimer()).run(Task(PROMPT, 24, True, replay, policy))
    assert run.rounds[:4] == [(3, 2), (2, 1), (8, 6), (3, 2)]
    capped = LoopContender(target, drafter, HostTimer()).run(Task(PROMPT, 12, True, (7,), TracePolicy(Trace(8, ((4, 0),)))))
    assert capped.rounds[0] == (4, 3)
    assert policy.fresh().nominal(None, 8) == 3


def test_phases_add_up_and_belong_to_their_steps(toy_pair):
    """A clock that ticks once a mark: every phase of a round lasts as many ticks as it has borders."""
    target, drafter = toy_pair

    class Ticks(HostTimer):
        now = 0

        def mark(self, *produced):
            self.now += 1
            return float(self.now)

    contender = LoopContender(target, drafter, Ticks())
    spent = contender.phases(Task(PROMPT, 30, True))
    rounds = contender.run(Task(PROMPT, 30, True)).round_count
    assert {name: len(values) for name, values in spent.items()} == dict.fromkeys(PHASES, rounds)
    assert spent["draft"][0] == 1 and spent["stage 0"][0] == 1 and spent["commit"][0] == 2  # the target's and the drafter's
    plain = contender.phases(Task(PROMPT, 5, False))
    assert set(plain["draft"]) == {0.0} and set(plain["stage 1"]) == {1.0} and set(plain["commit"]) == {1.0}


def test_a_recorder_that_saw_no_round_is_empty():
    recorder = PhaseRecorder(HostTimer())
    recorder.end("commit drafter")  # the prompt's
    assert recorder.phases() == {phase: [] for phase in PHASES}


def test_rounds_of_a_length_verify_that_length_and_commit_one_token(toy_pair):
    target, drafter = toy_pair
    rounds = LengthRounds(target, drafter, PROMPT, 40, HostTimer(), seed=0)
    for w in (1, 2, 8, 16):
        assert rounds.block(w).shape == (1, w)
    rounds.one(16)
    rounds.one(1)
    assert len(rounds.cache.tokens) == len(PROMPT) + 2 and rounds.draft_cache["length"] == len(PROMPT) + 2
    with pytest.raises(DSpineError, match="exceed the context of 4096"):
        LengthRounds(target, drafter, [1] * 4090, 40, HostTimer(), seed=0)


# Shapes, random folders, floors.


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "qwen3-4b", "SmolLM2-135M", "Qwen/Qwen3.6-35B-A3B"])
def test_known_shapes_have_the_size_their_names_say(name):
    preset = find_preset(name)
    count = sum(int(np.prod(shape)) for shape in target_tensors(preset.config).values())
    said = {"qwen3-8b": 8.19e9, "qwen3-4b": 4.02e9, "smollm2-135m": 134.5e6, "qwen3.6-35b-a3b": 34.66e9}
    assert count == pytest.approx(said[name.rpartition("/")[2].lower()], rel=0.005)
    config = parse_drafter_config(preset.drafter)
    text = preset.config.get("text_config", preset.config)
    assert config.method == "dspine" and config.num_target_layers == text["num_hidden_layers"]
    assert (config.hidden_size, config.vocab_size) == (text["hidden_size"], text["vocab_size"])


def test_layers_are_cut_and_the_drafter_follows():
    cut = cut_layers(find_preset("Qwen/Qwen3.6-35B-A3B"), 8)
    text = cut.config["text_config"]
    assert text["num_hidden_layers"] == 8 == len(text["layer_types"]) == cut.drafter["num_target_layers"]
    assert cut.drafter["dflash_config"]["target_layer_ids"] == [0, 2, 3, 5, 7] and "cut to 8 of 40" in cut.name
    assert len(target_tensors(find_preset("Qwen/Qwen3-8B").config)) == 36 * 11 + 3


def test_a_random_folder_is_made_once_and_its_numbers_are_as_meant(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path))
    preset = find_preset("toy-hybrid")
    folder, draft = preset_folders(preset)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert preset_folders(preset) == (folder, draft) and (folder / "model.safetensors").stat().st_mtime_ns == stamp
    found = {name: read_tensor(entry) for name, entry in read_header(folder / "model.safetensors").items()}
    assert {name: array.shape for name, array in found.items()} == target_tensors(preset.config)
    gate_up = found["model.language_model.layers.0.mlp.experts.gate_up_proj"]
    assert gate_up.std() == pytest.approx(32**-0.5, rel=0.1) and not np.array_equal(gate_up[0], gate_up[1])
    assert abs(found["model.language_model.layers.0.input_layernorm.weight"].mean()) < 0.1  # multiplies by 1 + w
    assert found["model.language_model.layers.0.linear_attn.norm.weight"].mean() == pytest.approx(1, abs=0.1)
    bare, _ = preset_folders(preset, weights=False)
    assert [path.name for path in bare.iterdir()] == ["config.json"]


def test_a_folder_that_does_not_fit_the_disk_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100})())
    with pytest.raises(DSpineError, match="GiB free: use --layers N"):
        preset_folders(find_preset("toy-dense"))


def test_floor_bytes_by_hand(tmp_path):
    shapes = {
        "model.embed_tokens.weight": (10, 4),
        "lm_head.weight": (10, 4),
        "model.layers.0.mlp.gate.weight": (3, 4),
        "model.layers.0.mlp.experts.gate_up_proj": (3, 8, 4),
        "model.visual.patch": (100, 100),
    }
    write_random(tmp_path / "model.safetensors", shapes)
    found = floors.target_bytes(floors.folder_sizes(tmp_path), {"num_experts": 3, "tie_word_embeddings": False}, "bfloat16")
    assert (found.dense, found.expert, found.experts, found.head) == (2 * (40 + 12), 2 * 32, 3, 80)
    assert found.read(2) == 104 + 128 and found.read(9) == 104 + 192
    tied = {name: value for name, value in floors.folder_sizes(tmp_path).items() if name != "lm_head.weight"}
    assert floors.target_bytes(tied, {"num_experts": 3, "tie_word_embeddings": True}, "float32").dense == 4 * (40 + 12)
    assert floors.expected_experts(8, 2, 1) == 2 and floors.expected_experts(8, 2, 2) == pytest.approx(3.5)
    assert floors.expected_experts(0, 2, 4) == 0


def test_floor_of_a_dense_preset_is_what_the_memory_plan_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path))
    preset = find_preset("toy-dense")
    folder, _ = preset_folders(preset)
    plan = dict(plan_memory(folder, None, tokens=50).parts)
    assert floors.target_bytes(floors.folder_sizes(folder), preset.config, "bfloat16").read(0) == plan["weights"]
    assert floors.context_bytes(preset.config, 50, "bfloat16") == plan["K/V"]


# Traces.


def test_a_trace_comes_back(tmp_path):
    read = load_trace(written_trace(tmp_path / "t.json", [(8, 3), (2, 1)]))
    assert (
        read.rounds == ((8, 3), (2, 1))
        and read.acceptance_length == 3
        and "REPLAYED from t.json: 2 rounds of m with d" in read.label()
    )
    with pytest.raises(DSpineError, match="nothing to record"):
        save_trace(tmp_path / "empty.json", 8, [], {})


@pytest.mark.parametrize("name", ["smollm2", "hybrid-tiny", "hybrid-tiny-full", "hybrid-tiny-hybridspec"])
def test_shipped_traces_are_whole(name):
    trace = load_trace(name)
    assert (SHIPPED / f"{name}.json").is_file() and len(trace.rounds) >= 40 and 1.5 < trace.acceptance_length < trace.block_size


def test_a_hybrid_shape_takes_hybridspecs_lengths_and_full_verification_of_the_same_prompts():
    shape = BenchOptions(random_weights="Qwen/Qwen3.6-35B-A3B", policy="trace")
    settings = build_settings(shape)
    assert settings.trace.source["policy"] == "hybridspec" and "by the costs of Qwen3.6-35B-A3B" in settings.trace.label()
    assert (
        settings.full_trace.source["policy"] == "full"
        and settings.trace.source["prompts"] == settings.full_trace.source["prompts"]
    )
    assert len({verified for verified, _ in settings.trace.rounds}) > 4
    whole = build_settings(replace(shape, policy="full"))
    assert (whole.trace.name, whole.full_trace) == ("hybrid-tiny.json", None)
    named = build_settings(replace(shape, trace="hybrid-tiny", full_trace="hybrid-tiny-full"))
    assert (named.trace.name, named.full_trace.name) == ("hybrid-tiny.json", "hybrid-tiny-full.json")
    with pytest.raises(DSpineError, match="beside another --policy"):
        build_settings(replace(shape, policy="full", trace="hybrid-tiny", full_trace="hybrid-tiny-full"))
    dense = build_settings(replace(shape, random_weights="Qwen/Qwen3-8B"))
    assert (dense.trace.name, dense.full_trace) == ("smollm2.json", None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("not json", "no readable JSON file"),
        ("[]", "not a dspine-acceptance-trace"),
        ('{"format": "dspine-acceptance-trace", "version": 2}', "of version 1"),
        ('{"format": "dspine-acceptance-trace", "version": 1, "block_size": 8, "rounds": []}', "expected block_size above 1"),
        ('{"format": "dspine-acceptance-trace", "version": 1, "block_size": 8, "rounds": [[8, 8]]}', "accepted < verified"),
        ('{"format": "dspine-acceptance-trace", "version": 1, "block_size": 8, "rounds": [[9, 1]]}', "accepted < verified"),
        ('{"format": "dspine-acceptance-trace", "version": 1, "block_size": 8, "rounds": [[8, true]]}', "accepted < verified"),
    ],
)
def test_damaged_traces_are_refused(dspine, tmp_path, content, said):
    (tmp_path / "t.json").write_text(content)
    made = dspine("bench", "--random-weights", "toy-dense", "--trace", tmp_path / "t.json")
    assert made.code == 2 and said in made.err and made.err.count("\n") == 1


# Bad input.


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--random-weights", "Qwen/Qwen9"), "known: "),
        (("--random-weights", "toy-dense", "--layers", "9"), "--layers must be 1..3"),
        (("--random-weights", "toy-hybrid", "--layers", "3"), "whole groups of 4"),
        (("--layers", "2"), "--layers goes with --random-weights"),
        (("--lengths", "0-4"), "within 1..16"),
        (("--lengths", "4,17"), "within 1..16"),
        (("--lengths", "5-2"), "within 1..16"),
        (("--lengths", "four"), "must look like"),
        (("--prompts", "0"), "--prompts must be at least 1"),
        (("--prompts", "5"), "--prompts must be 1..4 without --prompt-file"),
        (("--prompt-file", "x.jsonl", "--random-weights", "toy-dense"), "random weights have no tokenizer"),
        (("--tokens", "1"), "--tokens must be at least 2"),
        (("--repetitions", "0"), "--repetitions must be at least 1"),
        (("--context", "0"), "--context must be at least 1"),
        (("--policy", "trace"), "name one with --trace"),
        (("--random-weights", "toy-dense", "--record-trace", "x.json"), "--record-trace needs a real pair"),
        (("--no-draft", "--trace", "smollm2"), "drop --no-draft"),
        (("--no-draft", "--full-trace", "smollm2"), "drop --no-draft"),
        (("--full-trace", "smollm2"), "name its trace with --trace"),
        (("--parts", "speed,floors"), "--parts must name some of speed, phases, lengths, got floors"),
        (("--record-trace", "x.json", "--parts", "phases"), "--record-trace needs the runs of --parts speed"),
        (("--random-weights", "toy-dense", "--model", "elsewhere"), "exclude each other"),
        (("--tune", "--backend", "toy"), "the toy runtime has none"),
    ],
)
def test_bad_input_is_one_line_before_any_work(toy, dspine, flags, said):
    made = dspine("bench", *flags)
    assert made.code == 2 and said in made.err and made.err.count("\n") == 1 and made.out == ""


def test_an_unknown_preset_lists_all(dspine):
    assert len(preset_names()) == 6
    assert all(name in dspine("bench", "--random-weights", "nope").err for name in preset_names())


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
def test_a_trace_beyond_the_drafters_block_and_a_context_beyond_the_model_are_refused(dspine, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path / "cache"))
    shape = ("--backend", "torch", "--device", "cpu", "--random-weights", "toy-dense")
    long = written_trace(tmp_path / "t.json", [(16, 12)], block=16)
    assert "accepts up to 12 drafts a round, this drafter proposes 7" in dspine("bench", *shape, "--trace", long).err
    short = written_trace(tmp_path / "s.json", [(8, 2)])
    assert "toy" not in (made := dspine("bench", *shape, "--trace", short, "--context", "500")).out
    assert made.code == 2 and "holds 512: take fewer" in made.err


def test_weights_beyond_the_memory_are_refused_before_they_are_made(dspine, tmp_path, monkeypatch):
    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("dspine.common.memory.host_memory", lambda: type("Memory", (), {"usable": 100, "source": "a test"})())
    trace = written_trace(tmp_path / "s.json", [(8, 2)])
    pytest.importorskip("torch", reason="torch is not installed")
    made = dspine("bench", "--backend", "torch", "--device", "cpu", "--random-weights", "toy-dense", "--trace", trace)
    assert made.code == 2 and "use --layers N" in made.err and not (tmp_path / "cache").exists()


def test_lengths():
    assert parse_lengths("1-16") == tuple(range(1, 17)) and parse_lengths("4,1,2-3,3") == (1, 2, 3, 4)


def test_a_damaged_preset_is_named(tmp_path, monkeypatch):
    (tmp_path / "bad.json").write_text("{}")
    monkeypatch.setattr("dspine.common.bench.presets._FOLDER", tmp_path)
    with pytest.raises(CheckpointError, match="damaged preset"):
        preset_names()


def test_plots(toy, dspine, small_array, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    made = dspine(
        "bench", "--backend", "toy", "--model", toy / "model", "--draft-model", toy / "draft", *QUICK, "--context", "8",
        "--lengths", "1,2", "--plots", tmp_path / "plots",
    )  # fmt: skip
    assert made.code == 0, made.err
    for name in ("lengths", "phases"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_mlx_timer_finds_arrays_in_caches():
    pytest.importorskip("mlx", reason="mlx is not installed")
    import mlx.core as mx

    from dspine_mlx.timer import arrays_in

    class Holder:
        def __init__(self):
            self.layers = [{"k": mx.zeros(2)}, (mx.ones(3), None)]
            self.name, self.call = "x", print

    assert sorted(array.size for array in arrays_in(Holder())) == [2, 3]


@pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed")
@pytest.mark.parametrize("preset", ["toy-dense", "toy-hybrid"])
def test_weights_in_memory_have_the_shapes_of_the_folder(tmp_path, monkeypatch, preset):
    """The runtime's own list of tensors against the one written here, and both forms run."""
    import torch

    from dspine_cuda.runtime import RUNTIME

    monkeypatch.setenv("DSPINE_CACHE", str(tmp_path))
    shape = find_preset(preset)
    folder, _ = preset_folders(shape)
    bare, _ = preset_folders(shape, weights=False)
    tokens = torch.tensor([[3, 4, 5]], dtype=torch.int32)
    for target in (RUNTIME.load_target(folder, device="cpu"), RUNTIME.load_random_target(bare, device="cpu")):
        logits = target.prefill(target.make_cache(8), tokens, chunk=4).logits
        assert logits.shape == (1, 128) and torch.isfinite(logits).all() and logits.std() > 0.1


def test_a_plain_drafter_of_the_same_backbone():
    """What injection and refinement cost is the difference of two drafters of one shape."""
    preset = find_preset("toy-dense")
    config, plain = (parse_drafter_config(p.drafter, where="preset") for p in (preset, plain_drafter(preset)))
    assert (config.method, plain.method) == ("dspine", "dflash") and plain.dspine is None
    assert plain.is_causal and plain.block_size == config.block_size
    backbone = set(expected_tensors(plain))
    assert backbone < set(expected_tensors(config))


def test_a_plain_drafter_needs_a_shape(dspine):
    made = dspine("bench", "--plain-drafter")
    assert made.code == 2 and "--random-weights" in made.err


def test_only_the_contenders_that_are_named(toy, dspine, small_array):
    pair = ("--backend", "toy", "--model", toy / "model", "--draft-model", toy / "draft", *QUICK, "--context", "8", "--json")
    made = dspine("bench", *pair, "--only", "loop")
    assert made.code == 0, made.err
    assert [item["name"] for item in json.loads(made.out)["contenders"]] == ["loop"]
    missing = dspine("bench", *pair, "--only", "graphs")
    assert missing.code == 2 and "graphs: not here" in missing.err and "has loop" in missing.err
