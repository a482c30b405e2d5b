"""Caches of targets: the rules of reserve and commit, and what `check_integrity` finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from dspine.common.errors import DSpineError
from dspine_cuda.caches import KVCache, RollbackCache, TransformersCache

CPU = torch.device("cpu")


def make(capacity: int = 12, batch: int = 1) -> KVCache:
    return KVCache(3, 2, capacity, 4, torch.float32, CPU, batch)


def write(cache: KVCache, values: list[float]) -> None:
    """Pending rows filled with one value each."""
    cache.reserve(len(values))
    for layer in cache.pending_rows():
        for row, value in enumerate(values):
            layer[:, :, :, row] = value


def rows(cache: KVCache, layer: int) -> list[float]:
    keys, values = cache.visible()
    assert torch.equal(keys[layer], values[layer])
    return keys[layer][0, 0, :, 0].tolist()


def test_rejected_rows_are_overwritten_in_every_layer():
    cache = make()
    write(cache, [1, 2, 3, 4])
    cache.commit(2)
    assert (cache.length, cache.pending) == (2, 0)
    write(cache, [5, 6, 7])
    assert [rows(cache, layer) for layer in range(3)] == [[1, 2, 5, 6, 7]] * 3
    cache.commit(3)
    cache.check_integrity()
    assert rows(cache, 2) == [1, 2, 5, 6, 7]


def test_a_second_finish_replaces_the_first():
    cache = make()
    write(cache, [1, 2])
    write(cache, [3])
    assert cache.pending == 1 and rows(cache, 0) == [3]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 16), st.integers(0, 16)), max_size=12))
def test_content_equals_a_plain_list(steps):
    """Whatever is verified and kept, the committed rows are those of a list that never saw the rejected ones."""
    cache, model, stamp = make(40), [], 0
    for w, m in steps:
        if len(model) + w > 40:
            with pytest.raises(DSpineError, match="capacity is 40"):
                cache.reserve(w)
            continue
        block = [float(stamp + i) for i in range(w)]
        stamp += w
        write(cache, block)
        keep = min(m, w)
        cache.commit(keep)
        model += block[:keep]
        cache.check_integrity()
        assert rows(cache, 1) == model and cache.length == len(model)


def test_views_are_of_one_buffer_and_of_the_right_batch():
    cache = make(batch=3)
    assert cache.nbytes == 3 * 2 * 3 * 2 * 16 * 4 * 4  # 12 rows asked for, room in whole tiles of 16
    cache.reserve(5)
    assert {tuple(view.shape) for view in cache.pending_rows()} == {(2, 3, 2, 5, 4)}
    assert {tuple(view.shape) for half in cache.visible() for view in half} == {(3, 2, 5, 4)}
    assert {tuple(view.shape) for half in cache.visible(whole_tiles=True) for view in half} == {(3, 2, 16, 4)}


def test_misuse_is_one_line():
    cache = make()
    with pytest.raises(DSpineError, match="commit of 1 tokens, but 0 are pending"):
        cache.commit(1)
    cache.reserve(3)
    for wrong in (4, -1):
        with pytest.raises(DSpineError, match=f"commit of {wrong} tokens, but 3 are pending"):
            cache.commit(wrong)
    with pytest.raises(DSpineError, match="0 tokens committed and 13 more asked for, its capacity is 12"):
        cache.reserve(13)
    for capacity, batch in ((0, 1), (4, 0)):
        with pytest.raises(DSpineError, match=f"got {capacity} and {batch}"):
            RollbackCache(capacity, batch)


def test_check_integrity_finds_broken_states():
    cache = make()
    write(cache, [1, 2])
    cache.commit(2)
    cache.store[1, 0, 0, 0, 1, 0] = float("nan")
    with pytest.raises(DSpineError, match="not all finite"):
        cache.check_integrity()
    for length, pending in ((-1, 0), (11, 2), (0, -1)):
        broken = make()
        broken.length, broken.pending = length, pending
        with pytest.raises(DSpineError, match="cache broken"):
            broken.check_integrity()
    swapped = make()
    swapped.batch = 2
    with pytest.raises(DSpineError, match="cache broken: store"):
        swapped.check_integrity()


def test_transformers_cache_crops_in_every_layer():
    past = DynamicCache()
    cache = TransformersCache(past, 10)

    def grow(count: int) -> None:
        cache.reserve(count)
        for layer in range(2):
            past.update(torch.arange(float(count)).reshape(1, 1, count, 1), torch.zeros(1, 1, count, 1), layer)

    grow(4)
    cache.check_integrity()
    cache.commit(4)
    grow(3)
    cache.commit(1)
    cache.check_integrity()
    assert past.layers[1].keys.flatten().tolist() == [0, 1, 2, 3, 0]
    grow(2)
    cache.commit(0)
    grow(5)
    cache.reserve(1)  # a verification that was never committed is dropped
    assert past.get_seq_length() == 5
    with pytest.raises(DSpineError, match="cache broken: layers hold"):
        cache.check_integrity()
    with pytest.raises(DSpineError, match="its capacity is 10"):
        cache.reserve(6)
