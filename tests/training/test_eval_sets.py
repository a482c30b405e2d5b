"""`dspine eval`: rounds read off finished texts against the real loop; intervals; file shapes; clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dspine.common.errors import DSpineError
from dspine.common.tokenizer import load_tokenizer
from dspine_cuda.drafter import load_drafter
from dspine_cuda.training.cli import main
from dspine_cuda.training.config import parse_train_config
from dspine_cuda.training.data import load_conversations
from dspine_cuda.training.eval_command import EvalSettings, evaluate
from dspine_cuda.training.eval_sets import load_texts, read_sets, save_texts, write_texts
from dspine_cuda.training.intervals import acceptance_interval, ratio_interval, tokens_a_round
from dspine_cuda.training.loop import train
from dspine_cuda.training.recipe import Recipe, RecipeSettings
from dspine_cuda.training.simulate import Text, _filled, acceptance_chance, inference_states, simulate, text_probability
from dspine_cuda.training.target import load_frozen_target
from tests.training.test_recipe import prompt_file
from tests.training.toys import train_settings, write_target, write_tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A target, drafters trained for a few steps on its own answers, prompt files."""
    place = tmp_path_factory.mktemp("eval")
    write_tokenizer(write_target(place / "target"))
    settings = RecipeSettings(
        model=str(place / "target"), prompts=(str(prompt_file(place / "train.jsonl", 60)),), max_prompt_tokens=24, max_tokens=24
    )
    Recipe(settings, place / "data", device="cpu", dtype="float32", batch=32, progress=False).run()
    for method in ("dspine", "dflash"):
        extra = {"loss": {"alpha": 1.0, "chunk_rows": 50} | ({"alignment_scale": 0.2} if method == "dspine" else {})}
        model = train_settings(place)["model"] | {"method": method}
        run = train_settings(place)["run"] | {"output_dir": str(place / method), "log_every": 25}
        sections = extra | {"model": model, "run": run, "schedule": {"max_steps": 25}, "optimizer": {"learning_rate": 1e-2}}
        train(parse_train_config(train_settings(place, **sections)))
    (place / "sets").mkdir()
    for seed, name in enumerate(("a", "b")):
        prompt_file(place / "sets" / f"{name}.jsonl", 6, seed=10 + seed)
    rows = [{"turns": ["w9 w10", "w11 w12 w13"]}]
    (place / "sets" / "turns.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return place


def settings_of(place: Path, **changes) -> EvalSettings:
    facts = {
        "drafter": str(place / "dspine" / "drafter"), "prompts": tuple(sorted((place / "sets").glob("*.jsonl"))),
        "model": str(place / "target"), "max_tokens": 20, "device": "cpu", "dtype": "float32", "progress": False, "batch": 8,
    }  # fmt: skip
    return EvalSettings(**(facts | changes))


@pytest.mark.parametrize("method", ["dspine", "dflash"])
def test_greedy_rounds_equal_the_real_loop(place: Path, method: str) -> None:
    """Prompt by prompt: the same tokens in the same number of rounds, second turns included."""
    drafter = str(place / method / "drafter")
    results = [
        evaluate(settings_of(place, drafter=drafter, temperatures=(0.0,), method=way))["temperatures"]["0"]
        for way in ("simulate", "generate")
    ]
    assert list(results[0]["sets"]) == ["a", "b", "turns"]
    for name in results[0]["sets"]:
        assert results[0]["sets"][name]["counts"] == results[1]["sets"][name]["counts"]
    assert results[0]["mean"] == results[1]["mean"] and results[0]["mean"]["tau"] > 1.2


@pytest.mark.parametrize(("method", "rule"), [("dspine", "rejection"), ("dflash", "point-mass")])
def test_sampled_rounds_agree_with_the_real_loop(place: Path, method: str, rule: str) -> None:
    """Equal in distribution: two estimates from different draws, within their joint error."""
    taus, spreads = [], []
    prompt_file(place / "many.jsonl", 18, seed=30)
    for way in ("simulate", "generate"):
        settings = settings_of(
            place, drafter=str(place / method / "drafter"), temperatures=(0.7,), method=way, acceptance=rule,
            prompts=(place / "many.jsonl",), batch=18,
        )  # fmt: skip
        mean = evaluate(settings)["temperatures"]["0.7"]["mean"]
        taus.append(mean["tau"])
        spreads.append((mean["high"] - mean["low"]) / 3.92)
    assert abs(taus[0] - taus[1]) < 4 * float(np.hypot(*spreads))
    assert taus[0] > 1.02


def test_acceptance_of_a_first_draft_is_the_overlap_of_p_and_q(place: Path) -> None:
    """Rejection: sum over x of p(x) min(1, q(x) / p(x)) = sum of min(p, q), with q as drafting itself reports it."""
    from dspine.common.protocols import DraftRequest

    target = load_frozen_target(place / "target", torch.device("cpu"), torch.float32)
    drafter = load_drafter(place / "dspine" / "drafter", target)
    heat, vocab, width = 0.7, 96, drafter.config.num_proposals
    for conversation in load_conversations(place / "data"):
        anchor = conversation.prompt_length
        prompt = torch.from_numpy(conversation.tokens[: anchor + 1].astype(np.int64))[None]
        tokens = torch.cat([prompt.expand(vocab, -1), torch.arange(vocab)[:, None].expand(-1, width + 2)], dim=1)
        cache, likely = _filled(drafter, target, tokens, heat)
        cache.length = anchor
        states = inference_states(drafter, cache, tokens[:, anchor])
        q = text_probability(drafter, states, tokens[:, anchor + 1 : anchor + 1 + width], heat)
        p = likely[:, anchor]
        assert float(p.sum()) == pytest.approx(1.0, abs=1e-4) and float(q[:, 0].sum()) == pytest.approx(1.0, abs=1e-4)
        proposal = drafter.propose(cache, tokens[:, anchor], DraftRequest(heat, torch.full((vocab, width), 0.5)))
        exact = torch.zeros(vocab).scatter_(0, proposal.candidates[0, 0], proposal.q[0, 0])
        torch.testing.assert_close(q[:, 0], exact, rtol=1e-4, atol=1e-6)
        overlap = float(torch.minimum(p, exact).sum())
        if 0.05 < overlap < 0.95:
            break
    assert 0.05 < overlap < 0.95
    assert float((p * acceptance_chance(q[:, 0], p, "rejection")).sum()) == pytest.approx(overlap, abs=1e-4)
    assert float((p * acceptance_chance(q[:, 0], p, "point-mass")).sum()) == pytest.approx(float((p * exact).sum()), abs=1e-4)
    texts = [Text(tokens[i].numpy(), anchor, number=1000 * n + i) for n in range(12) for i in range(vocab)]
    for rule in ("rejection", "point-mass"):
        rounds = simulate(drafter, target, texts, temperature=heat, seed=1, rule=rule)
        first = np.array([r.accepted[0] >= 1 for r in rounds]).reshape(12, vocab).mean(axis=0)
        chance = acceptance_chance(q[:, 0], p, rule).numpy()
        spread = np.sqrt((p.numpy() ** 2 * chance * (1 - chance) / 12).sum())
        assert abs(float((p.numpy() * (first - chance)).sum())) < 4 * spread + 1e-6


@pytest.mark.parametrize("method", ["dspine", "dflash"])
@pytest.mark.parametrize("heat", [0.0, 0.7])
def test_all_anchors_at_once_equal_the_inference_code(place: Path, method: str, heat: float) -> None:
    target = load_frozen_target(place / "target", torch.device("cpu"), torch.float32)
    drafter = load_drafter(place / method / "drafter", target)
    texts = [Text(c.tokens.astype(np.int64), c.prompt_length, i) for i, c in enumerate(load_conversations(place / "data")[:20])]
    texts.append(Text(texts[0].tokens[: texts[0].start + 1], texts[0].start, 99))  # one token: no round
    for independent in (False, True):
        results = [
            simulate(drafter, target, texts, temperature=heat, seed=3, packed=packed, independent=independent, batch=7)
            for packed in (True, False)
        ]
        assert [r.accepted.tolist() for r in results[0]] == [r.accepted.tolist() for r in results[1]]
        assert [r.emitted for r in results[0]] == [r.emitted for r in results[1]]
        assert sum(int(r.accepted.sum()) for r in results[0]) > 5 and len(results[0][-1].accepted) == 0


def test_bfloat16_on_the_cpu_scores_too(place: Path) -> None:
    """Rounds there keep reordered copies of the weights; the trainer's forward, which scores, needs the modules' own."""
    blocks = evaluate(settings_of(place, dtype="bfloat16", temperatures=(0.0,)))["temperatures"]
    assert blocks["0"]["mean"]["tau"] >= 1.0


def test_texts_are_kept_and_belong_to_their_settings(place: Path, tmp_path: Path) -> None:
    settings = settings_of(place, texts=tmp_path, temperatures=(0.0, 1.0))
    first = evaluate(settings)
    assert {path.name for path in tmp_path.iterdir()} == {"texts_0.npz", "texts_1.npz"}
    assert evaluate(settings) == first
    with pytest.raises(DSpineError, match="texts made with other settings .seed: 0 there, 1 now"):
        evaluate(settings_of(place, texts=tmp_path, seed=1))
    target = load_frozen_target(place / "target", torch.device("cpu"), torch.float32)
    sets = read_sets([place / "sets" / "turns.jsonl"], 4)
    texts = write_texts(target, load_tokenizer(place / "target"), sets, temperature=1.0, max_tokens=9, seed=0, batch=3)
    save_texts(tmp_path / "t.npz", texts, {"a": 1})
    for ours, theirs in zip(texts, load_texts(tmp_path / "t.npz", {"a": 1}), strict=True):
        np.testing.assert_array_equal(ours.text.tokens, theirs.text.tokens)
        assert (ours.text.start, ours.set_name, ours.prompt) == (theirs.text.start, theirs.set_name, theirs.prompt)
    assert [t.prompt for t in texts] == [0, 0] and texts[1].text.start > texts[0].text.start


def test_damaged_and_foreign_texts_are_named(place: Path, tmp_path: Path) -> None:
    """A cut file, another file under the name, other prompts in a file of the same name; one made before prompts were noted."""
    own = tmp_path / "a.jsonl"
    own.write_bytes((place / "sets" / "a.jsonl").read_bytes())
    settings = settings_of(place, prompts=(own,), texts=tmp_path, temperatures=(0.0,))
    first, path = evaluate(settings), tmp_path / "texts_0.npz"
    whole = path.read_bytes()
    for content in (b"", whole[:200], whole[:-30]):
        path.write_bytes(content)
        with pytest.raises(DSpineError, match="texts_0.npz: not a readable file of texts .*; delete it"):
            evaluate(settings)
    np.savez(path, tokens=np.arange(4))
    with pytest.raises(DSpineError, match="not a file of texts .it lacks lengths, starts"):
        evaluate(settings)
    path.write_bytes(whole)
    prompt_file(own, 6, seed=3)
    with pytest.raises(DSpineError, match="texts made with other settings .prompts: "):
        evaluate(settings)
    with np.load(path) as arrays:
        content = dict(arrays)
    content["facts"] = np.array(json.dumps({k: v for k, v in json.loads(str(content["facts"])).items() if k != "prompts"}))
    np.savez(path, **content)
    assert evaluate(settings) == first


def test_a_set_without_room_for_answers_is_an_error(place: Path, tmp_path: Path) -> None:
    """Its figure would be nothing's mean; single prompts that are too long are left out."""
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps("w9 " * 250) + "\n")
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(json.dumps("w9 w10 w11") + "\n" + json.dumps("w9 " * 250) + "\n")
    blocks = evaluate(settings_of(place, prompts=(mixed,), temperatures=(0.0,)))["temperatures"]
    assert blocks["0"]["sets"]["mixed"]["prompts"] == 1
    with pytest.raises(DSpineError, match="set long: none of its 1 prompts leaves room for --max-tokens 20 in .* of 256"):
        evaluate(settings_of(place, prompts=(mixed, long), temperatures=(0.0,)))


def test_intervals() -> None:
    rng = np.random.default_rng(0)
    rounds = rng.integers(5, 40, 200)
    counts = np.stack([rounds * 3.0, rounds], axis=1)
    assert acceptance_interval([counts]) == pytest.approx((3.0, 3.0, 3.0))
    noisy = counts * np.stack([rng.uniform(0.5, 1.5, 200), np.ones(200)], axis=1)
    tau, low, high = acceptance_interval([noisy, noisy[:50]])
    assert low < tau < high and tau == pytest.approx((tokens_a_round(noisy) + tokens_a_round(noisy[:50])) / 2)
    ratio, low, high = ratio_interval([noisy * [1.1, 1.0]], [noisy])
    assert (ratio, low, high) == pytest.approx((1.1, 1.1, 1.1))  # paired: the noise of the prompts cancels
    with pytest.raises(ValueError, match="same prompts"):
        ratio_interval([noisy], [noisy[:50]])


def test_the_command_and_its_errors(place: Path, tmp_path: Path, capsys) -> None:
    arguments = [
        "eval",
        str(place / "dspine" / "drafter"),
        "--model",
        str(place / "target"),
        "--max-tokens",
        "9",
        "--device",
        "cpu",
    ]
    arguments += ["--dtype", "float32", "--no-progress", "--temperature", "0"]
    files = ["--prompts", str(place / "sets" / "a.jsonl"), "--json", str(tmp_path / "out.json"), "--count", "3"]
    assert main([*arguments, *files]) == 0
    out = capsys.readouterr()
    result = json.loads(out.out)
    assert (
        result == json.loads((tmp_path / "out.json").read_text()) and result["temperatures"]["0"]["sets"]["a"]["prompts"] <= 3
    )
    assert out.err.splitlines()[0].startswith("set") and out.err.splitlines()[-1].startswith("mean")
    for extra, message in (
        ([], "no prompts: give a folder with the seven sets"),
        (["--prompts", str(place / "sets")], "no gsm8k.jsonl, math500.jsonl"),
        (["--prompts", str(tmp_path / "none.jsonl")], "cannot read the prompts"),
        ([*files, "--method", "guess"], "--method must be one of simulate, generate"),
        ([*files, "--acceptance", "always"], "--acceptance must be auto or one of"),
    ):
        assert main([*arguments, *extra]) == 2
        assert message in capsys.readouterr().err
