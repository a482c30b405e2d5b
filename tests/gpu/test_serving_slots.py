"""Batches of the server as real CUDA graphs: every answer is that of the same steps without graphs, bit for bit, and of the
request alone but for near ties; sequences join, end and are cancelled at random; idle slots are not written to (case R8)."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dspine_cuda.drafter import load_drafter  # noqa: E402
from dspine_cuda.graphs import PLAIN, EagerRunner, GraphRunner  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
from dspine_cuda.serving_graphs import SlotGraphs  # noqa: E402
from tests.helpers.drafters import drafter_folder  # noqa: E402
from tests.helpers.hybrids import save_hybrid  # noqa: E402
from tests.helpers.models import save_tiny  # noqa: E402
from tests.serving.slot_runs import (  # noqa: E402
    BLOCK,
    PROMPTS,
    SLOTS,
    TOKENS,
    alone,
    join,
    params_of,
    rounds_of,
    run_at_random,
    turn,
    untouched_while_others_run,
)

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
    eager, _ = run_at_random(*rounds_of(pair, EagerRunner), pair, solo, seed)
    assert graphs == eager and most >= 3
    ends = [(i, output) for i, output, ended in graphs if ended]
    assert sum(output == solo[i] for i, output in ends) >= 0.7 * len(ends)


def test_idle_slots_are_not_written_to(pair, solo):
    found = untouched_while_others_run(*rounds_of(pair, GRAPHS), pair, solo)
    assert found == untouched_while_others_run(*rounds_of(pair, EagerRunner), pair, solo)


def test_captures_while_others_run(pair, solo):
    """A way of sampling that comes later captures its graphs beside a running sequence, whose rows stay as they are."""
    rounds, book = rounds_of(pair, GRAPHS)
    first = join(rounds, book, pair, 0, solo[0])
    for _ in range(3):
        turn(rounds, [first])
    later = join(rounds, book, pair, 2)
    while not (first.finish_reason and later.finish_reason):
        turn(rounds, [first, later])
    eager, other = rounds_of(pair, EagerRunner)
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
