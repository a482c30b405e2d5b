"""Static decoding run eagerly on the CPU against the eager targets: every length, every acceptance count, every end."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")


from dspine.common.decoding import DecodingParams, decode  # noqa: E402
from dspine.common.protocols import DraftRequest  # noqa: E402
from dspine_cuda.drafter import load_drafter  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
from dspine_cuda.static.arena import Arena, ArenaShape  # noqa: E402
from dspine_cuda.static.round import StaticRound, read_report  # noqa: E402
from tests.helpers.drafters import drafter_folder  # noqa: E402
from tests.helpers.hybrids import save_hybrid  # noqa: E402
from tests.helpers.models import VOCAB, one_thread, prompt, save_tiny  # noqa: E402

FAMILIES = ("llama", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe")
WIDTH, PAST, ROOM = 8, 11, 40


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """(target, drafter) of every family, blocks of 8."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        (save_tiny if family in ("llama", "qwen3") else save_hybrid)(folder / "t", family)
        target = RUNTIME.load_target(folder / "t", device="cpu", dtype="float32")
        found[family] = target, load_drafter(drafter_folder(folder / "d", "dspine", WIDTH, target.head_weight(), 5), target)
    return found


def started(target, drafter, text, budget=ROOM, rows=WIDTH, stop_ids=frozenset(), rules=None, uniforms=None):
    """A round behind a prefilled prompt text[:PAST], and the logits of the prefill."""
    arena = Arena(target, drafter, ArenaShape(PAST + budget, text.shape[0], rows))
    result = target.prefill(arena.cache, text[:, :PAST], chunk=8)
    if drafter is not None:
        drafter.commit(arena.draft_cache, result.features)
    batch = text.shape[0]
    arena.start([PAST] * batch, text[:, PAST].tolist(), [budget] * batch, stop_ids, uniforms)
    return StaticRound(target, drafter, arena, rules)


def close(got, want, bound=2e-5):
    """Relative Frobenius error, as in parity. Typical is 2e-6; a text may stand out by ten times that, where the
    small hybrid forgets nearly all of a head and its norm amplifies the rest."""
    error = torch.linalg.vector_norm((got - want).double()) / max(float(torch.linalg.vector_norm(want.double())), 1e-3)
    assert got.shape == want.shape and float(error) <= bound, float(error)


def forced(round_, row):
    """Write a block instead of drafting one."""
    round_.arena.block.zero_()
    round_.arena.block[:, : len(row)].copy_(torch.tensor(row, dtype=torch.int32))
    round_.arena.finite.fill_(True)


LENGTHS = [(f, w) for f in ("qwen3", "qwen3_5_moe_text") for w in range(1, WIDTH + 1)]


@pytest.mark.parametrize(("family", "w"), [*LENGTHS, *((f, 5) for f in FAMILIES if f not in ("qwen3", "qwen3_5_moe_text"))])
def test_every_length_and_acceptance(pairs, family, w):
    """Logits, features and what follows are those of the eager target after every accepted count."""
    target, drafter = pairs[family]
    text = prompt(PAST + 1, seed=6)
    for accepted in range(w):
        round_ = started(target, drafter, text)
        cache, draft_cache = target.make_cache(64), drafter.make_cache(64)
        drafter.commit(draft_cache, target.prefill(cache, text[:, :PAST], chunk=8).features)
        anchor = int(text[0, PAST])
        for turn, count in enumerate((accepted, w - 1 - accepted, 0)):
            row = [anchor]
            for i in range(w - 1):  # the right text for `count` drafts, then a wrong one
                block = torch.tensor([row])
                best = int(target.finish(cache, target.begin(cache, block), len(row)).logits[0, -1].argmax())
                row.append(best if i < count else (best + 1) % VOCAB)
            verification = target.finish(cache, target.begin(cache, torch.tensor([row])), w)
            forced(round_, row)
            round_.verify(w)
            report = read_report(round_.arena.report[0].numpy())
            close(round_.output.logits, verification.logits)
            close(round_.output.features, verification.features)
            assert report.accepted == count and report.drafts == row[1:], turn
            m = count + 1
            assert report.tokens == [*row[1:m], int(verification.logits[0, count].argmax())]
            target.commit(cache, verification, m)
            drafter.commit(draft_cache, verification.features[:, :m])
            anchor = report.tokens[-1]
            assert int(round_.arena.lengths[0]) == cache.length == draft_cache.length
            assert int(round_.arena.anchor[0]) == anchor
        request = DraftRequest(signals=True)
        want = drafter.propose(draft_cache, torch.tensor([anchor]), request)
        got = round_.drafter.propose(request)
        assert got.tokens.tolist() == want.tokens.tolist()
        close(got.confidence, want.confidence, 1e-4)
        same_cache(round_.arena, cache)


def same_cache(arena, cache):
    """Folded back, the arena's caches are the eager ones."""
    arena.hand_back(cache.length)
    kv, want = (getattr(c, "kv", c) for c in (arena.cache, cache))
    close(kv.store[..., : cache.length, :], want.store[..., : cache.length, :])
    if hasattr(cache, "states") and cache.states.numel():
        close(arena.cache.states, cache.states)
        close(arena.cache.windows, cache.windows)
    arena.cache.check_integrity()


def rounds(round_, step, count=10**6):
    """Tokens of slot 0 until the budget is used up."""
    tokens, reports = [], []
    while int(round_.arena.remaining[0]) and len(reports) < count:
        step()
        reports.append(read_report(round_.arena.report[0].numpy()))
        tokens += reports[-1].tokens
    return tokens, reports


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("w", [1, 3, WIDTH])
def test_greedy_text_is_the_eager_one(pairs, family, w):
    """To the budget's last token; rounds launched afterwards change nothing."""
    target, drafter = pairs[family]
    text = prompt(PAST + 1, seed=3)
    params = DecodingParams(max_tokens=ROOM + 1, break_even=0.0)
    want = [e.token for e in decode(target, None, text[0, :PAST].tolist(), params)]
    text[0, PAST] = want[0]
    round_ = started(target, drafter if w > 1 else None, text, rows=WIDTH if w > 1 else 1)
    got, _ = rounds(round_, (lambda: round_.drafted(w)) if w > 1 else round_.plain)
    assert got == want[1:]
    before = [x.clone() for x in (round_.arena.lengths, round_.arena.anchor, round_.arena.kv.store[..., :-1, :])]
    for _ in range(2):
        (round_.plain if w == 1 else lambda: round_.drafted(w))()
        assert read_report(round_.arena.report[0].numpy()).tokens == []
    for kept, now in zip(before, (round_.arena.lengths, round_.arena.anchor, round_.arena.kv.store), strict=True):
        assert torch.equal(kept, now[..., :-1, :] if now.dim() > 1 else now)  # the last row is scrap


@pytest.mark.parametrize("w", [1, 5])
def test_products_of_fixed_rows_change_nothing(pairs, w):
    """`pad_rows`: the rows behind the block reach nothing."""
    target, drafter = pairs["qwen3"]
    text = prompt(PAST + 1, seed=6).expand(2, -1)
    found = []
    for pad_rows in (0, 16):
        round_ = started(target, drafter, text)
        round_.target.pad_rows = pad_rows
        forced(round_, text[0, PAST - w + 1 :].tolist())
        round_.verify(w)
        found.append((round_.output.logits, round_.output.features, round_.arena.kv.store[..., :-1, :]))
    for got, want in zip(*found, strict=True):
        close(got, want)


def test_a_stop_token_among_accepted_drafts(pairs):
    """Cut on the device: nothing behind the stop token is emitted or committed, and the slot has ended."""
    target, drafter = pairs["qwen3"]
    text = prompt(PAST + 1, seed=3)
    params = DecodingParams(max_tokens=9, break_even=0.0)
    right = [e.token for e in decode(target, None, text[0, :PAST].tolist(), params)]
    text[0, PAST] = right[0]
    stop = next(i for i in range(2, 8) if right[i] not in right[1:i])
    round_ = started(target, drafter, text, stop_ids=frozenset({right[stop]}))
    forced(round_, right[:WIDTH])
    round_.verify(WIDTH)
    assert read_report(round_.arena.report[0].numpy()).tokens == right[1 : stop + 1]
    assert int(round_.arena.remaining[0]) == 0 and int(round_.arena.lengths[0]) == PAST + stop
