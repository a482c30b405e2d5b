"""The soak of `benchmarks/serving_soak.py` for a moment: nothing wrong, nothing left over, every answer its solo run's."""

from __future__ import annotations

import asyncio

from benchmarks.serving_soak import growth, soak

PROMPTS = ["short", "another question", "a longer question that goes on for some time " * 3, "same", "same beginning", "x"]


def test_mixed_load(toy):
    tally = asyncio.run(soak(toy.url, "toy", PROMPTS, seconds=3, clients=6, longest=60))
    assert not tally.wrong and not tally.differing
    assert set(tally.kinds) == {"whole", "stream", "sampled", "cancelled", "bad", "plain"} and tally.tokens > 100
    for _ in range(500):
        if toy.server.scheduler.occupancy == (0, 0):
            break
        asyncio.run(asyncio.sleep(0.01))
    assert toy.server.scheduler.occupancy == (0, 0)
    prefixes = toy.server.scheduler.prefixes
    assert prefixes.nbytes <= prefixes.limit and max(toy.runtime.batcher.sizes) > 1


def test_growth():
    assert growth([50, 100, 100, 100, 102]) == 102 / 100 - 1
