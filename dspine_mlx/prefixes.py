"""Committed tokens of a sequence as something to keep: `protocols.PrefixOps` for the server, moves for a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from dspine.common.protocols import ServingSupport
from dspine_mlx.caches import HybridCache
from dspine_mlx.kv import WindowKV


@dataclass(frozen=True)
class Saved:
    """Copies of what the first `length` tokens left in the target's cache and, where there is one, the drafter's."""

    length: int
    target: dict[str, mx.array]
    facts: dict[str, int]
    draft: dict[str, mx.array] | None


class MlxPrefixes:
    """`protocols.PrefixOps` on MLX. A shorter prefix than was saved can be loaded only from caches of whole K/V (`cuts`)."""

    def __init__(self, cuts: bool = True) -> None:
        self.cuts = cuts

    def nbytes(self, cache: Any, draft_cache: Any, length: int) -> int:
        """Bytes that `save` would take."""
        arrays = [*cache.export(length)[0].values(), *(draft_cache.export(length).values() if draft_cache is not None else ())]
        return sum(array.nbytes for array in arrays)

    def save(self, cache: Any, draft_cache: Any, length: int) -> Saved:
        """Copy of the first `length` tokens of both caches."""
        target, facts = cache.export(length)
        draft = draft_cache.export(length) if draft_cache is not None else None
        saved = Saved(length, _copied(target), facts, None if draft is None else _copied(draft))
        mx.eval(saved.target, saved.draft or {})
        return saved

    def load(self, saved: Saved, cache: Any, draft_cache: Any, length: int) -> None:
        """The first `length` tokens of `saved` into two empty caches."""
        cache.restore(_copied(saved.target), saved.facts, length)
        if draft_cache is not None:
            assert saved.draft is not None
            draft_cache.restore(saved.draft, length, saved.length)
        mx.async_eval(cache.export(length)[0])

    def copy(self, cache: Any, draft_cache: Any, to_cache: Any, to_draft_cache: Any, length: int) -> None:
        """The first `length` committed tokens of two caches into two empty ones."""
        arrays, facts = cache.export(length)
        to_cache.restore(_copied(arrays), facts, length)
        if to_draft_cache is not None:
            to_draft_cache.restore(draft_cache.export(length), length)
        mx.async_eval(to_cache.export(length)[0])

    def move(self, cache: Any, draft_cache: Any, to_cache: Any, to_draft_cache: Any, length: int) -> None:
        """Like `copy`, but the first two caches are spent: no byte is held twice."""
        to_cache.adopt(cache, length)
        if to_draft_cache is not None:
            to_draft_cache.adopt(draft_cache, length)

    def reaches(self, cache: Any, draft_cache: Any, length: int) -> bool:
        """Whether `copy` and `move` can go back to `length` tokens."""
        return cache.reaches(length) and (draft_cache is None or draft_cache.reaches(length))


def _copied(arrays: dict[str, mx.array]) -> dict[str, mx.array]:
    """New arrays with the same bits: parts of a buffer would keep the whole of it, and stop writes in place."""
    return {name: array * mx.array(1, dtype=array.dtype) for name, array in arrays.items()}


def support(target: Any, drafter: Any) -> ServingSupport:
    """For the server: kept prefixes; sequences take turns. States and windows cannot be cut: snapshots of them are kept."""
    cache = target.make_cache(1)
    whole = not any(isinstance(layer, WindowKV) for layer in cache.layers)
    windows = drafter is not None and any(rule.reach is not None for rule in drafter.rules)
    cuts = whole and not windows and not (isinstance(cache, HybridCache) and cache.gdn_ids)
    return ServingSupport(None, MlxPrefixes(cuts), "sequences take turns, round by round")
