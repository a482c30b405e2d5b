"""A prompt read into a slot piece by piece, held to the eager prefill; on the CPU and on CUDA."""

from __future__ import annotations

from functools import partial

import torch

from tests.helpers.models import prompt

CONTEXT = 700
CLOSE = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
PIECES = [(1,), (31,), (32,), (33,), (64, 65), (128, 128, 44), (512, 88), (1, 1, 64, 4), (255, 257)]


def poisoned(slots):
    """K/V of every slot hold no numbers: what no length reaches may be anything."""
    for store in (slots.arena.kv.store, slots.arena.draft_cache._store):
        store.fill_(torch.nan)
    return slots


def memory_of(arena, slot):
    """Everything that a prompt in a slot leaves, scrap aside."""
    found = [arena.kv.store[:, :, slot, :, :-1], arena.draft_cache._store[:, :, slot, :, :-1]]
    return [*found, arena.cache.states[:, slot], arena.cache.windows[:, slot]] if arena.pending is not None else found


def same_bits(kept, now):
    """Equal everywhere, and no number where there was none."""
    return all(torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0)) for old, new in zip(kept, now, strict=True))


def eager(pair, ids, chunk):
    """(logits, memory) of the eager prefill of ids int [1, T]."""
    target, drafter = pair
    cache, draft = target.make_cache(CONTEXT), drafter.make_cache(CONTEXT)
    read = target.prefill(cache, ids.to(target.device), chunk=chunk)
    drafter.commit(draft, read.features)
    memory = [getattr(cache, "kv", cache).store[:, :, 0, :, : ids.shape[1]], draft._store[:, :, 0, :, : ids.shape[1]]]
    has_states = getattr(cache, "gdn_index", None)
    return read.logits, [*memory, cache.states[:, 0], cache.windows[:, 0]] if has_states else memory


def check_piece(pair, slots, slot, pieces, close=CLOSE):
    """Read a prompt in these pieces: everything is the eager prefill's; the other slots keep every bit."""
    arena, ids, at = slots.arena, prompt(sum(pieces), seed=sum(pieces)), 0
    others = [other for other in range(slots.count) if other != slot]
    before = [[part.clone() for part in memory_of(arena, other)] for other in others]
    slots.caches(slot, True)
    for count in pieces:
        logits = slots.read(slot, at, ids[0, at : at + count].tolist())
        at += count
    wanted, memory = eager(pair, ids, chunk=max(pieces))
    close(logits, wanted)
    for index, (got, want) in enumerate(zip(memory_of(arena, slot), memory, strict=True)):
        got = got[..., :at, :] if index < 2 else got
        close(got, want)
        assert index > 1 or not memory_of(arena, slot)[index][..., at:, :].isfinite().any(), "rows behind the prompt"
    for other, kept in zip(others, before, strict=True):
        assert same_bits(kept, memory_of(arena, other)), other
