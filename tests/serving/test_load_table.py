"""The load benchmark on a toy server: every side asks for what its name says, and the tables are the figures."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("httpx", reason="httpx is not installed")

from benchmarks import serving, serving_overhead


@pytest.fixture
def args(tmp_path):
    lines = [{"messages": [{"role": "user", "content": f"prompt {i}"}]} for i in range(10)]
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return serving.parse(["--prompts", str(tmp_path), "--sets", "one,two", "--clients", "1,3", "--max-tokens", "12"])


def test_prompts_are_spread_over_a_file(args):
    chosen = serving.read_prompts(args.prompts, ["one", "two"], 3)
    assert chosen == ["prompt 0", "prompt 3", "prompt 6"] * 2
    assert serving.read_prompts(args.prompts / "one.jsonl", ["ignored"], 50) == [f"prompt {i}" for i in range(10)]


def test_rows_and_tables(toy, args):
    prompts = serving.read_prompts(args.prompts, args.sets.split(","), 2)
    rows = [
        serving._row(args, toy.url, "toy", prompts, serving.SIDES, count, 2, cycle, None)
        for cycle in range(2)
        for count in args.clients
    ]
    for row in rows:
        assert row["requests"] == max(3, 2 * row["clients"]) == row["same_text"]
        assert row["plain"]["drafted"] == 0 and row["plain"]["tokens_per_round"] == 1.0
        assert row["full"]["drafted"] > 0 and row["full"]["tokens_per_round"] > 1.0
        assert all(row[side]["tokens"] == 12 * row["requests"] for side in serving.SIDES)
        assert all(0 < row[side]["prefill"] <= row[side]["first_token"] for side in serving.SIDES)
        assert all(row[side]["first_over_prefill"] > 1 and row[side]["http"] > 0 for side in serving.SIDES)
        assert all(0 < row[side]["outside_share"] < 1 for side in serving.SIDES)
    table = serving.summarise(rows)
    assert [entry["clients"] for entry in table] == [1, 3] and table[0]["cycles"] == 2
    assert table[1]["same_text"] == "12 of 12" and table[0]["cpu_ratio_over_plain"] is None
    text = serving.markdown({"summary": table, "overhead": None})
    lines = text.splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    both = serving.markdown({"summary": table, "overhead": {"requests": 0} | dict.fromkeys(
        serving.OVERHEAD, serving_overhead.spread([])
    )})  # fmt: skip
    assert both.startswith(text) and both.count("\n- ") == len(serving.OVERHEAD)


def test_cycles(toy, args, tmp_path, monkeypatch):
    """Everything is warmed up alike; a short cycle of every side at every client count always runs, longer ones while they fit,
    and they alone count; the file is there after each. The clock is the test's: a cycle's second per request."""
    asked, files, now = [], [], [0.0]
    real, row = serving.block, serving._row

    def counted(url, bodies, clients, pid=None):
        asked.append((clients, bodies[0]["draft"], len(bodies), bodies[0]["max_tokens"], bodies[0].get("ignore_eos")))
        return real(url, bodies, clients, pid)

    def timed(*rest):
        found = row(*rest)
        now[0] += found["requests"]
        return found

    def kept(place, result):
        write(place, result)
        files.append(json.loads(place.read_text()))

    write = serving.write_json
    monkeypatch.setattr(serving, "block", counted)
    monkeypatch.setattr(serving, "_row", timed)
    monkeypatch.setattr(serving, "write_json", kept)
    monkeypatch.setattr(serving.time, "monotonic", lambda: now[0])
    prompts = serving.read_prompts(args.prompts, args.sets.split(","), 2)
    args.out, args.budget, args.ignore_eos, args.per_client = tmp_path / "load.json", 0.0, True, 3
    serving.run_cycles(args, toy.url, "toy", prompts, serving.SIDES, None, {})
    sides, drafts = list(serving.SIDES), list(serving.SIDES.values())
    assert asked[0] == (3, True, 4, 2, True)
    assert asked[1:7] == [(n, draft, n, args.warm_tokens, True) for draft in drafts for n in (1, 3)]
    assert asked[7:] == [(1, draft, 3, 12, True) for draft in drafts] + [
        (3, draft, 3, 12, True) for draft in (*drafts[1:], drafts[0])
    ]
    assert len(files) == 1 and [entry["clients"] for entry in files[0]["summary"]] == [1, 3]
    assert all(files[0]["rows"][i][side]["tokens"] == 36 for i in (0, 1) for side in sides)
    files.clear()
    args.budget = 6 + 12 + 12 + 7.0  # after two long cycles there is room for a short one
    serving.run_cycles(args, toy.url, "toy", prompts, serving.SIDES, None, {})
    assert [file["cycles"] for file in files] == [1, 2, 3, 4]
    assert [row["requests"] for row in files[-1]["rows"]] == [3, 3, 3, 9, 3, 9, 3, 3]
    assert [entry["cycles"] for entry in files[-1]["summary"]] == [4, 2]
    assert not (tmp_path / "load.json.part").exists()


def test_ratios_are_medians_of_each_cycle():
    """Written out: 2x and 4x in two cycles, whatever the cycles' own speeds."""

    def side(speed):
        names = ("first_token", "first_over_prefill", "http", "tokens_per_round")
        return {"tokens_per_second": speed, "tokens_per_cpu_second": None} | dict.fromkeys(names, 1.0)

    rows = [
        {"clients": 1, "requests": 3, "same_text": 3, "speculative": side(a), "full": side(b), "plain": side(c)}
        for a, b, c in ((20.0, 10.0, 10.0), (400.0, 400.0, 100.0))
    ]
    entry = serving.summarise(rows)[0]
    assert entry["ratio_over_plain"] == 3.0 and entry["ratios_over_plain"] == [2.0, 4.0]
    assert entry["ratio_over_full"] == 1.5 and entry["cpu_ratio_over_full"] is None
    assert "| **3.00** | 1.50 | - |" in serving.markdown({"summary": [entry], "overhead": None})


def test_what_http_costs():
    """By hand: 3 s against 2 s with 5 % outside the rounds, 1.2 s of CPU time against 1 s; unequal answers are not compared."""
    found = {name: [] for name in serving.OVERHEAD}
    answer = {"latencies": [3.0], "first_token": 0.5, "first_over_prefill": 1.25, "outside_share": 0.05, "tokens": 12}
    serving_overhead.compare(found, answer | {"cpu": 1.2}, (2.0, 0.4, 12, 1.0))
    serving_overhead.compare(found, answer | {"cpu": 9.9}, (2.0, 0.4, 11, 1.0))
    assert {name: [round(value, 9) for value in values] for name, values in found.items()} == {
        "seconds_http_over_direct": [1.5],
        "rounds_http_over_direct": [1.425],
        "cpu_http_over_direct": [1.2],
        "first_token_http_over_direct": [1.25],
        "first_token_over_prefill": [1.25, 1.25],
        "outside_rounds_share": [0.05, 0.05],
    }


def test_http_and_the_api_on_one_engine(registry, toy, args, monkeypatch):
    """The whole measurement, its client a process of its own."""
    monkeypatch.setattr("dspine.common.generation.load", lambda *others, **options: toy.engine)
    monkeypatch.setattr("dspine.common.runtimes.choose_runtime", lambda name: (registry, "asked for"))
    args.model, args.direct_seconds, args.direct_prompts = "toy", 0.0, 3
    prompts = serving.read_prompts(args.prompts, ["one"], 3)
    bodies = [serving.chat_body("toy", prompt, args.max_tokens, True) for prompt in prompts]
    found = serving_overhead.measure_overhead(args, prompts, bodies)
    assert found["requests"] == 3 and set(found) == {"requests", *serving.OVERHEAD}
    assert all(found[name]["median"] > 0 for name in serving.OVERHEAD)


@pytest.mark.parametrize("wrong", [["--sides", "fast"], ["--clients", "0"], ["--per-client", "0"]])
def test_wrong_arguments(wrong, args, capsys):
    with pytest.raises(SystemExit):
        serving.parse(["--prompts", str(args.prompts), *wrong])
    assert "--sides takes" in capsys.readouterr().err
