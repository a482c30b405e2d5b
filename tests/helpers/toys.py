"""Toy target and drafter in NumPy: logic tests that need no weights and no framework."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from dspine.common.protocols import DraftRequest, Prefill, Proposal, StageZero, TargetInfo, Verification


class NumpyArrays:
    def to_device(self, array: Any) -> np.ndarray:
        return np.asarray(array)

    def to_host(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(np.asarray(a) for a in arrays)


class ToyCache:
    def __init__(self) -> None:
        self.tokens: list[int] = []


def markov_logits(vocab: int, seed: int, scale: float = 2.0) -> Callable[[list[int]], np.ndarray]:
    """Logits that depend on the last two tokens."""
    table = np.random.default_rng(seed).normal(size=(vocab, vocab, vocab)) * scale
    return lambda context: table[context[-2] if len(context) > 1 else 0, context[-1]]


class ToyTarget:
    """`logits_of(context tokens)` is the whole model; the cache is the list of committed tokens."""

    record_routing = False

    def __init__(self, logits_of: Callable[[list[int]], np.ndarray], vocab: int, context: int = 4096) -> None:
        self.logits_of = logits_of
        self.info = TargetInfo("toy", "toy", 1, 1, vocab, context, frozenset(), "float64", "cpu", "toy")
        self.arrays = NumpyArrays()
        self.forwards = 0

    def make_cache(self, capacity: int) -> ToyCache:
        return ToyCache()

    def prefill(self, cache: ToyCache, tokens: np.ndarray, *, chunk: int) -> Prefill:
        cache.tokens += [int(t) for t in tokens[0]]
        return Prefill(self.logits_of(cache.tokens)[None], np.zeros((1, tokens.shape[1], 1)))

    def begin(self, cache: ToyCache, tokens: np.ndarray) -> StageZero:
        return StageZero(tokens, None)

    def finish(self, cache: ToyCache, stage: StageZero, w: int) -> Verification:
        self.forwards += 1
        block = [int(t) for t in stage.tokens[0, :w]]
        rows = [self.logits_of(cache.tokens + block[: i + 1]) for i in range(w)]
        return Verification(np.stack(rows)[None], np.zeros((1, w, 1)), factors=block)

    def commit(self, cache: ToyCache, verification: Verification, m: int) -> None:
        cache.tokens += verification.factors[:m]


class ToyDrafter:
    """`draft(context + [anchor], uniforms or None) -> (tokens, candidates, q)`; q None for greedy drafts."""

    def __init__(self, draft: Callable[..., Any], block_size: int, method: str = "dspine") -> None:
        self.draft = draft
        self.config = SimpleNamespace(block_size=block_size, num_proposals=block_size - 1, method=method)
        self.info: dict[str, Any] = {}
        self.contexts: list[int] = []
        self.finite = True
        self.rounds = 0

    def make_cache(self, capacity: int) -> dict[str, int]:
        return {"length": 0}

    def commit(self, cache: dict[str, int], features: np.ndarray) -> None:
        cache["length"] += features.shape[1]

    def propose(self, cache: dict[str, int], anchor: np.ndarray, request: DraftRequest) -> Proposal:
        self.rounds += 1
        self.contexts.append(cache["length"])
        uniforms = None if request.uniforms is None else request.uniforms[0]
        tokens, candidates, q = self.draft(int(anchor[0]), uniforms, request.temperature)
        finite = np.array([self.finite])
        if q is None:
            return Proposal(np.asarray(tokens, dtype=np.int32)[None], finite)
        return Proposal(
            np.asarray(tokens, dtype=np.int32)[None],
            finite,
            np.asarray(candidates)[None],
            np.asarray(q, dtype=np.float32)[None],
        )


def oracle_drafter(
    logits_of: Callable[[list[int]], np.ndarray], prompt: list[int], block: int, wrong_every: int = 0
) -> ToyDrafter:
    """Drafts the target's own greedy text; every `wrong_every`-th draft is off by one. The cache length says where."""
    text = list(prompt)
    for _ in range(600):
        text.append(int(np.argmax(logits_of(text))))
    drafter = ToyDrafter(lambda *args: None, block)

    def draft(anchor: int, uniforms: Any, temperature: float) -> tuple[list[int], None, None]:
        at = drafter.contexts[-1] + 1
        tokens = text[at : at + block - 1]
        vocab = len(logits_of(text[:1]))
        if wrong_every:
            tokens = [(t + 1) % vocab if (at + i) % wrong_every == 0 else t for i, t in enumerate(tokens)]
        return tokens, None, None

    drafter.draft = draft
    return drafter
