"""Batches of the server as real CUDA graphs: every answer is that of the same steps without graphs, bit for bit, and of the
request alone but for near ties; sequences join, end and are cancelled at random; idle slots are not written to (case R8)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
for name in ("httpx", "fastapi", "uvicorn"):
    pytest.importorskip(name, reason=f"{name} is not installed (dspine[server])")

import httpx  # noqa: E402

from dspine.common.generation import load  # noqa: E402
from dspine.common.serving.scheduler import SchedulerSettings  # noqa: E402
from dspine.common.serving.server import Server  # noqa: E402
from dspine.common.serving.settings import ServerSettings  # noqa: E402
from dspine_cuda.drafter import load_drafter  # noqa: E402
from dspine_cuda.graphs import PLAIN, GraphRunner  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
from dspine_cuda.serving_graphs import SlotGraphs  # noqa: E402
from tests.helpers.drafters import drafter_folder  # noqa: E402
from tests.helpers.hybrids import save_hybrid  # noqa: E402
from tests.helpers.models import VOCAB, save_tiny  # noqa: E402
from tests.serving.slot_runs import (  # noqa: E402
    BLOCK,
    PROMPTS,
    SLOTS,
    TOKENS,
    Capturing,
    alone,
    join,
    params_of,
    rounds_of,
    run_at_random,
    turn,
    untouched_while_others_run,
)
from tests.serving.toys import running  # noqa: E402

GRAPHS = partial(GraphRunner, conditional=False)


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen3_5_text", "qwen3_5_moe_text"])
def pair(request, tmp_path_factory):
    """(target, drafter) in float32."""
    folder = tmp_path_factory.mktemp(request.param)
    (save_hybrid if "5" in request.param else save_tiny)(folder / "t", request.param, max_position_embeddings=TOKENS)
    target = RUNTIME.load_target(folder / "t", device="cuda", dtype="float32")
    return target, load_drafter(drafter_folder(folder / "d", "dspine", BLOCK, target.head_weight(), 5, head_dim=16), target)


@pytest.fixture(scope="module")
def solo(pair):
    return [alone(pair, i, params_of(i)) for i in range(len(PROMPTS))]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_answers(pair, solo, seed):
    """Graphs give what the same steps give without them; of the answers to an end, most are the eager loop's to the last token
    (tier 2: another number of rows is another sum, so a near tie may fall another way)."""
    graphs, most = run_at_random(*rounds_of(pair, GRAPHS), pair, solo, seed)
    eager, _ = run_at_random(*rounds_of(pair, Capturing), pair, solo, seed)
    assert graphs == eager and most >= 3
    ends = [(i, output) for i, output, ended in graphs if ended]
    assert sum(output == solo[i] for i, output in ends) >= 0.7 * len(ends)


def test_idle_slots_are_not_written_to(pair, solo):
    found = untouched_while_others_run(*rounds_of(pair, GRAPHS), pair, solo)
    assert found == untouched_while_others_run(*rounds_of(pair, Capturing), pair, solo)


def test_captures_while_others_run(pair, solo):
    """A way of sampling that comes later captures its graphs beside a running sequence, whose rows stay as they are."""
    rounds, book = rounds_of(pair, GRAPHS)
    first = join(rounds, book, pair, 0, solo[0])
    for _ in range(3):
        turn(rounds, [first])
    later = join(rounds, book, pair, 2)
    while not (first.finish_reason and later.finish_reason):
        turn(rounds, [first, later])
    eager, other = rounds_of(pair, Capturing)
    loops = [join(eager, other, pair, 0, solo[0])]
    for _ in range(3):
        turn(eager, loops)
    loops.append(join(eager, other, pair, 2))
    while not all(loop.finish_reason for loop in loops):
        turn(eager, loops)
    assert [first.output, later.output] == [loop.output for loop in loops]


def test_real_slots(pair):
    """As the server makes them: graphs of one pool for every number of slots, measured; nothing of a slot is left behind."""
    slots = SlotGraphs(*pair, SLOTS, TOKENS)
    verify, draft = slots.measure()
    assert set(verify) == {(size, w) for size in (1, 2, 4) for w in (1, *slots.widths)} and set(draft) == {1, 2, 4}
    assert all(seconds > 0 for seconds in verify.values())
    assert slots.ready(("greedy", params_of(0).sampling), [1, 0, 2], True) and slots._runners
    assert not slots.arena.lengths.any() and not slots.arena.remaining.any()
    assert all(runner.has(PLAIN) for runner in slots._runners.values())
    slots.close()
    assert not slots._runners


def test_server(tmp_path):
    """`--graphs on` with four sequences from the folder to the answer: eight requests at once, the texts of the eager server
    where no near tie decides, and every one says how it ran."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_tiny(tmp_path / "t", "qwen3")
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0", eos_token="w2").save_pretrained(tmp_path / "t")
    head = RUNTIME.load_target(tmp_path / "t", device="cpu", dtype="float32").head_weight()
    drafter_folder(tmp_path / "d", "dspine", BLOCK, head, 5, head_dim=16)
    bodies = [{"prompt": PROMPTS[i % 4], "temperature": 0} for i in range(6)]
    bodies += [{"prompt": PROMPTS[4], "temperature": 0.8, "seed": 5}, {"prompt": PROMPTS[5], "temperature": 0, "logprobs": 1}]
    texts, told = {}, {}
    for graphs in ("off", "on"):

        def make(graphs=graphs):
            return load(RUNTIME, str(tmp_path / "t"), str(tmp_path / "d"), device="cuda", dtype="float32", graphs=graphs)

        settings = ServerSettings(names=("tiny",), max_context=256, scheduler=SchedulerSettings(max_concurrency=4))
        server = Server(make, settings)
        assert server.summary()["graphs"] is (graphs == "on")
        assert server.summary()["prompts"].startswith("captured: " if graphs == "on" else "eager: ")
        with running(server) as url, ThreadPoolExecutor(len(bodies)) as pool:

            def ask(body, url=url):
                sent = {"model": "tiny", "ignore_eos": True, "max_tokens": 32} | body
                return httpx.post(f"{url}/v1/completions", json=sent, timeout=300).raise_for_status().json()

            answers = list(pool.map(ask, bodies))
        texts[graphs] = [answer["choices"][0]["text"].split()[:8] for answer in answers]
        told[graphs] = [answer["usage"]["speculative"].get("rounds_by", "") for answer in answers]
    assert sum(on == off for on, off in zip(texts["on"], texts["off"], strict=True)) >= 6
    assert not any(told["off"]) and [how.partition(":")[0] for how in told["on"]] == ["graphs"] * 7 + ["eager"]
