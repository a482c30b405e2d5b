"""Prompts of slots as real CUDA graphs: one graph serves every slot, start and length; each piece is the eager prefill's, other
slots keep every bit, and nothing waits for the device before the first token is asked for."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.nn.attention import sdpa_kernel  # noqa: E402

from dspine.common.decoding import DecodingParams  # noqa: E402
from dspine.common.protocols import Engine  # noqa: E402
from dspine.common.sampling import SamplingParams  # noqa: E402
from dspine.common.selection.policies import StaticPolicy  # noqa: E402
from dspine.common.serving.slots import SlotRounds  # noqa: E402
from dspine_cuda.drafter import load_drafter  # noqa: E402
from dspine_cuda.graphs import GraphRunner  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
from dspine_cuda.serving_graphs import SlotGraphs  # noqa: E402
from dspine_cuda.serving_prompts import longest_piece  # noqa: E402
from dspine_cuda.static.prompts import _BACKENDS, PieceWhere  # noqa: E402
from tests.gpu.test_hybrid_cuda import no_host_read  # noqa: E402
from tests.helpers.drafters import drafter_folder  # noqa: E402
from tests.helpers.hybrids import save_hybrid  # noqa: E402
from tests.helpers.models import prompt, save_tiny  # noqa: E402
from tests.serving.batches import FixedCosts  # noqa: E402
from tests.serving.slot_prompts import CONTEXT, PIECES, check_piece, memory_of, poisoned, same_bits  # noqa: E402
from tests.serving.slot_runs import BLOCK, COSTS, turn  # noqa: E402

FAMILIES = ("llama", "qwen3", "qwen3_5_text", "qwen3_5_moe_text")
SLOTS = 3


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    root = tmp_path_factory.mktemp(request.param)
    (save_hybrid if "5" in request.param else save_tiny)(root / "t", request.param, max_position_embeddings=CONTEXT)
    head = RUNTIME.load_target(root / "t", device="cpu", dtype="float32").head_weight()
    drafter_folder(root / "d", "dspine", BLOCK, head, 5, head_dim=16)
    return root


def loaded(folder, dtype):
    target = RUNTIME.load_target(folder / "t", device="cuda", dtype=dtype)
    return target, load_drafter(folder / "d", target)


@pytest.fixture(scope="module")
def pair(folder):
    return loaded(folder, "float32")


@pytest.fixture(scope="module")
def slots(pair):
    """Real slots, whose graphs are captured on first use."""
    made = SlotGraphs(*pair, SLOTS, CONTEXT)
    yield made
    made.close()


def assert_near(got, want, bound):
    """By relative Frobenius error; small arrays of zeros pass by an absolute one."""
    assert got.isfinite().all()
    assert float((got.float() - want.float()).norm() / want.float().norm().clamp(min=1e-3)) < bound


@pytest.mark.parametrize("pieces", PIECES, ids=str)
def test_a_piece_is_the_eager_prefill(pair, slots, pieces):
    """In every slot by the same graphs, with memory that holds no numbers behind the prompts."""
    assert slots.prompts == "captured: pieces of up to 512 tokens, a graph a piece"
    poisoned(slots)
    for slot in range(SLOTS):
        check_piece(pair, slots, slot, pieces, partial(assert_near, bound=2e-4))
    many = len(slots._prompts._programs)
    check_piece(pair, slots, 0, pieces, partial(assert_near, bound=2e-4))
    assert len(slots._prompts._programs) == many


@pytest.mark.parametrize("pieces", [(33,), (64, 65), (255, 257)], ids=str)
def test_bfloat16(folder, pieces):
    """Close to the eager prefill where no router can fall the other way; everywhere what the same steps give without graphs."""
    pair = loaded(folder, "bfloat16")
    graphs = poisoned(SlotGraphs(*pair, SLOTS, CONTEXT))
    steps = poisoned(SlotGraphs(*pair, SLOTS, CONTEXT, partial(GraphRunner, conditional=False)))
    assert "steps without graphs" in steps.prompts and "a graph a piece" in graphs.prompts
    if "moe" not in pair[0].info.model_type:
        check_piece(pair, graphs, 1, pieces, partial(assert_near, bound=0.1))
    ids, at = prompt(sum(pieces), seed=1)[0].tolist(), 0
    for made in (graphs, steps):
        made.caches(2, True)
    for count in pieces:
        for made in (graphs, steps):
            logits = made.read(2, at, ids[at : at + count])
        at += count
        assert_near(graphs._prompts.steps.logits, logits, 0.02)
    for index, (got, want) in enumerate(zip(memory_of(graphs.arena, 2), memory_of(steps.arena, 2), strict=True)):
        got, want = (x[..., :at, :] if index < 2 else x for x in (got, want))
        assert_near(got, want, 0.02)
    graphs.close()


def test_capturing_changes_nothing(slots):
    """While a slot holds a prompt, every graph is captured anew: the bits of all slots stay."""
    slots.caches(0, True)
    slots.read(0, 0, prompt(70)[0].tolist())
    before = [[part.clone() for part in memory_of(slots.arena, slot)] for slot in range(SLOTS)]
    slots._prompts.close()
    slots.prepare_prompts(512)
    assert len(slots._prompts._programs) >= 10
    assert all(same_bits(kept, memory_of(slots.arena, slot)) for slot, kept in enumerate(before))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 64), (32, 8, 128), (8, 2, 256), (4, 4, 80)])
def test_attention_of_real_shapes(heads, kv_heads, size, dtype):
    """Against float64, with the library's kernels that a capture may use."""
    generator = torch.Generator("cuda").manual_seed(0)
    query, store = (
        torch.randn(shape, device="cuda", generator=generator).to(dtype)
        for shape in ((1, 128, heads, size), (2, 1, kv_heads, 528, size))
    )
    place = 200 + torch.arange(128, device="cuda")
    seen = torch.arange(512, device="cuda") <= place[:, None]
    mask = torch.zeros((128, 512), device="cuda", dtype=dtype).masked_fill_(~seen, -torch.inf)
    start, table = torch.tensor([200], dtype=torch.int32, device="cuda"), torch.zeros((1, 2), device="cuda")
    where = PieceWhere(start, start, table, table, 128, mask)
    with sdpa_kernel(_BACKENDS):
        got = where.attend(query, store, size**-0.5)
    keys, values = store[:, 0, :, :512].double().repeat_interleave(heads // kv_heads, dim=1).unbind(0)
    score = query[0].double().transpose(0, 1) @ keys.transpose(1, 2) * size**-0.5
    want = (score.masked_fill(~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1)[None]
    assert got.shape == query.shape
    assert_near(got, want, 1e-3 if dtype == torch.float32 else 1e-2)


def rounds_of(pair, **options):
    made = SlotGraphs(*pair, SLOTS, CONTEXT, **options)
    return SlotRounds(Engine(*pair, None, "torch", "", "", None), made, FixedCosts(COSTS, {1: 0.01, 4: 0.01}))


def answers(rounds, pair, chunk):
    """Texts of prompts of many lengths, up to three at once: graphs are captured between rounds that are under way."""
    running, found = [], []
    for i, count in enumerate((1, 31, 32, 33, 65, 130, 300, 513)):
        sampling = {"temperature": 0.9, "seed": i, "top_k": 30} if i % 3 == 2 else {}
        params = DecodingParams(max_tokens=16, sampling=SamplingParams(**sampling), prefill_chunk=chunk, break_even=0)
        loop, reason = rounds.loop(pair[1], prompt(count, seed=count)[0].tolist(), params, StaticPolicy(), True)
        assert loop is not None, reason
        while loop.reading_prompt:
            loop.step()
            turn(rounds, running)
        running, found = [*(each for each in running if each.finish_reason is None), loop], [*found, loop]
        while len(running) == SLOTS or (i == 7 and running):
            turn(rounds, running)
            running = [each for each in running if each.finish_reason is None]
    return [loop.output for loop in found]


@pytest.mark.parametrize("chunk", [128, 700])
def test_answers_are_those_of_the_eager_prefill(pair, chunk):
    """float32: the same first tokens, and the same texts but for a near tie."""
    captured, eager = (answers(rounds_of(pair, prompts=prompts), pair, chunk) for prompts in (True, False))
    assert [text[0] for text in captured] == [text[0] for text in eager]
    assert sum(one == other for one, other in zip(captured, eager, strict=True)) >= len(eager) - 1


def test_nothing_waits_before_the_first_token(pair):
    """Queueing pieces, choosing the first token and asking for it synchronise nothing; reading it does."""
    rounds = rounds_of(pair)
    for guarded in (False, True):  # kernels compile, and graphs are captured, in the first pass
        loop, _ = rounds.loop(pair[1], prompt(150)[0].tolist(), DecodingParams(prefill_chunk=128), StaticPolicy(), False)
        if guarded:
            with no_host_read():
                loop.step()
                loop.step()
        else:
            loop.step()
            loop.step()
        assert loop.awaiting and not loop.output
        loop.step()
        assert len(loop.output) == 1 and not loop.reading_prompt
        rounds.release(loop)


def test_steps_read_nothing_on_the_host(folder):
    """What is captured, run without a capture under torch's own watch."""
    for dtype in ("float32", "bfloat16"):
        pair = loaded(folder, dtype)
        assert longest_piece(pair[0]) == 512
        made = SlotGraphs(*pair, SLOTS, CONTEXT, partial(GraphRunner, conditional=False))
        steps = made._prompts.steps
        for guarded in (False, True):
            for program in steps.programs(512, 512):
                steps.send(1, 3, [5, 6, 7])
                if guarded:
                    with no_host_read():
                        steps.read(program)
                else:
                    steps.read(program)
