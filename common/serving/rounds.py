"""One round of several sequences as one batch: the parts of `DecodingLoop`'s round, with the heavy ones shared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from dspine.common.arrays import array_namespace, astype
from dspine.common.decoding import DecodingLoop, Round
from dspine.common.errors import DSpineError
from dspine.common.protocols import Batcher, DraftRequest, Engine, Proposal, Verification
from dspine.common.serving.lengths import BatchLengths, CostTable, time_best
from dspine.common.serving.shared import SHARED, SharedLengths

_PROBE_CONTEXT = 16


class BatchRounds:
    """Runs rounds of 2 and more sequences. A sequence that fails leaves alone; the others go on."""

    def __init__(self, engine: Engine, batcher: Batcher, costs: CostTable) -> None:
        self.engine, self.batcher = engine, batcher
        self.lengths = SharedLengths(costs) if batcher.shares_length else BatchLengths(costs)

    def run(self, loops: Sequence[DecodingLoop], pinned: Sequence[bool] = ()) -> list[Round | DSpineError]:
        """One round of each loop; an error in place of a round ends that sequence. pinned: see `BatchLengths.choose`."""
        started = perf_counter()
        limits = [loop.round_limit() for loop in loops]
        anchors = self.engine.target.arrays.to_device(np.array([loop.anchor for loop in loops], dtype=np.int32))
        proposals, lengths = self._propose(loops, limits, pinned)
        blocks = [
            self._block(anchors[i : i + 1], proposal, length)
            for i, (proposal, length) in enumerate(zip(proposals, lengths, strict=True))
        ]
        drafted = perf_counter()
        verifications = self.batcher.verify([loop.cache for loop in loops], blocks)
        results = self._judge(loops, blocks, proposals, verifications)
        verified = perf_counter()
        self._commit(loops, results, verifications)
        finished = perf_counter()
        drafts = sum(proposal is not None for proposal in proposals)
        self.lengths.costs.observe(len(loops), sum(lengths), verified - drafted, drafts, drafted - started)
        self.lengths.costs.observe_host(finished - verified)
        if any(loop.drafter is not None for loop in loops) and not any(pinned):  # rounds whose lengths are chosen here
            tokens = sum(len(result.events) for result in results if isinstance(result, Round))
            self.lengths.observe_round(len(loops), tokens, finished - started)
        for loop in loops:
            loop.stats.draft_seconds += drafted - started + finished - verified
            loop.stats.verify_seconds += verified - drafted
            loop.stats.decode_seconds += finished - started
        return results

    def _propose(
        self, loops: Sequence[DecodingLoop], limits: list[int], pinned: Sequence[bool]
    ) -> tuple[list[Proposal | None], list[int]]:
        """Proposals where drafting pays, and the tokens each sequence verifies."""
        tops = [self._top(loop, limit) for loop, limit in zip(loops, limits, strict=True)]
        lengths = self.lengths.choose(loops, tops, pinned)
        proposals: list[Proposal | None] = [None] * len(loops)
        picks = [i for i, length in enumerate(lengths) if length > 1]
        if not picks:
            return proposals, lengths
        made = self.batcher.propose(
            [loops[i].draft_cache for i in picks], [loops[i].anchor for i in picks], [loops[i].draft_request() for i in picks]
        )
        read = [array for proposal in made for array in (proposal.finite, proposal.confidence, proposal.entropy)]
        host = iter(self.engine.target.arrays.to_host(*[array for array in read if array is not None]))
        for i, proposal in zip(picks, made, strict=True):
            finite = next(host)
            signals = {name: next(host) for name in ("confidence", "entropy") if getattr(proposal, name) is not None}
            if not finite.all():
                loops[i].note_non_finite()
                continue
            proposals[i] = replace(proposal, **signals)
        return proposals, self.lengths.refine(loops, lengths, tops, proposals, pinned)

    @staticmethod
    def _top(loop: DecodingLoop, limit: int) -> int:
        """Most tokens this sequence can verify now; 1 where it does not draft."""
        return 1 if loop.drafter is None or limit < 2 else min(limit, 1 + loop.drafter.config.num_proposals)

    @staticmethod
    def _block(anchor: Any, proposal: Proposal | None, length: int) -> Any:
        block = anchor[:, None]
        if proposal is None or length < 2:
            return block
        xp = array_namespace(anchor)
        return xp.concat([block, astype(proposal.tokens[:, : length - 1], anchor.dtype)], axis=1)

    def _judge(
        self,
        loops: Sequence[DecodingLoop],
        blocks: list[Any],
        proposals: list[Proposal | None],
        verifications: list[Verification],
    ) -> list[Round | DSpineError]:
        """Acceptance under each sequence's own rule; one read for all."""
        verdicts: list[Any] = []
        for loop, block, proposal, verification in zip(loops, blocks, proposals, verifications, strict=True):
            try:
                verdicts.append(loop.judge(verification.logits, block, proposal))
            except DSpineError as error:
                verdicts.append(error)
        arrays = [
            array
            for block, verdict in zip(blocks, verdicts, strict=True)
            if not isinstance(verdict, DSpineError)
            for array in (block, verdict.accepted, verdict.next_token)
        ]
        host = iter(self.engine.target.arrays.to_host(*arrays))
        results: list[Round | DSpineError] = []
        for loop, verdict, verification in zip(loops, verdicts, verifications, strict=True):
            if isinstance(verdict, DSpineError):
                results.append(verdict)
                continue
            block, accepted, token = next(host), int(next(host)[0]), int(next(host)[0])
            drafts = [int(t) for t in block[0, 1:]]
            try:
                result = loop.settle(drafts, accepted, token, verification.logits)
                self.lengths.observe(loop, len(drafts), result.accepted)
                results.append(result)
            except DSpineError as error:
                results.append(error)
        return results

    def _commit(
        self, loops: Sequence[DecodingLoop], results: list[Round | DSpineError], verifications: list[Verification]
    ) -> None:
        caches, features = [], []
        counts = [0 if isinstance(result, DSpineError) else len(result.events) for result in results]
        self.batcher.commit([loop.cache for loop in loops], verifications, counts)
        for loop, count, verification in zip(loops, counts, verifications, strict=True):
            if loop.draft_cache is not None and count:
                caches.append(loop.draft_cache)
                features.append(verification.features[:, :count])
            if loop.drafter is None:
                loop.draft_cache = None
        if caches:
            self.batcher.commit_drafts(caches, features)


def measure_costs(engine: Engine, batcher: Batcher, largest: int) -> CostTable:
    """Time rounds on scratch caches: batches of 2, 4, .. up to `largest`, blocks of 1, 4, 8, .. tokens. Warms up, too."""
    target, drafter = engine.target, engine.drafter
    widest = 1 + drafter.config.num_proposals if drafter is not None else 1
    lengths = SHARED if batcher.shares_length else (4, 8, 16)
    widths = sorted({1, *(w for w in lengths if w < widest), widest})
    sizes = sorted({2, *(b for b in (4, 8, 16, 32) if b < largest), largest})  # one alone takes the loop's own round
    capacity = _PROBE_CONTEXT + 2 * widest
    caches = [target.make_cache(capacity) for _ in range(largest)]
    draft_caches = [drafter.make_cache(capacity) for _ in range(largest)] if drafter is not None else []
    # tokens of many kinds: equal ones would all go to the same experts
    tokens = np.random.default_rng(0).integers(
        target.info.vocab_size, size=(largest, max(_PROBE_CONTEXT, widest)), dtype=np.int32
    )
    for i, cache in enumerate(caches):
        read = target.prefill(cache, target.arrays.to_device(tokens[i : i + 1, :_PROBE_CONTEXT]), chunk=_PROBE_CONTEXT)
        if drafter is not None:
            drafter.commit(draft_caches[i], read.features)
    verify = {}
    for size in sizes:
        for width in widths:
            blocks = [target.arrays.to_device(tokens[i : i + 1, :width]) for i in range(size)]
            verify[size, width] = time_best(
                lambda size=size, blocks=blocks: _verify_once(engine, batcher, caches[:size], blocks)
            )
    draft = {}
    for size in sizes if drafter is not None else ():
        draft[size] = time_best(partial(_draft_once, engine, batcher, draft_caches[:size]))
    return CostTable(verify, draft)


def _verify_once(engine: Engine, batcher: Batcher, caches: Sequence[Any], blocks: Sequence[Any]) -> None:
    found = batcher.verify(caches, blocks)
    engine.target.arrays.to_host(*[verification.logits[:, :, :1] for verification in found])
    batcher.commit(caches, found, [0] * len(caches))


def _draft_once(engine: Engine, batcher: Batcher, caches: Sequence[Any]) -> None:
    found = batcher.propose(caches, [1] * len(caches), [DraftRequest()] * len(caches))
    engine.target.arrays.to_host(*[proposal.tokens for proposal in found])
