"""Chunked prefill of Gated DeltaNet against the token recurrence."""

from __future__ import annotations

import numpy as np
import pytest

from dspine.common.errors import DSpineError
from dspine.common.gdn import gdn_recurrence
from dspine.common.gdn_prefill import gdn_prefill
from tests.core.test_gdn import block, error


@pytest.mark.parametrize("chunk", [16, 32, 64, 128])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 64, 67, 130, 200])
def test_equals_the_recurrence(count, chunk):
    inputs = block(count)
    out, _, _, last = gdn_recurrence(*inputs)
    for dtype, bound in ((np.float64, 1e-12), (np.float32, 1e-5)):
        got, state = gdn_prefill(*(x.astype(dtype) for x in inputs), chunk=chunk)
        assert got.dtype == state.dtype == dtype and got.shape == out.shape
        assert error(got, out) < bound and error(state, last) < bound


def test_cut_anywhere():
    """State and outputs do not depend on where a prompt is cut."""
    q, k, v, log_decay, beta, state = block(100)
    whole, last = gdn_prefill(q, k, v, log_decay, beta, state)
    for cut in (1, 63, 64, 65, 99):
        first, middle = gdn_prefill(*(x[:, :cut] for x in (q, k, v, log_decay, beta)), state)
        second, end = gdn_prefill(*(x[:, cut:] for x in (q, k, v, log_decay, beta)), middle)
        assert error(np.concatenate([first, second], axis=1), whole) < 1e-12 and error(end, last) < 1e-12


@pytest.mark.parametrize("alpha", [6.5e-12, 1e-3, 1.0])
def test_hostile_decays_stay_finite(alpha):
    """N2: the smallest decays of a real model, over a chunk of 64."""
    q, k, v, _, beta, state = block(128, dtype=np.float32)
    log_decay = np.full_like(beta, np.log(alpha))
    with np.errstate(over="raise", invalid="raise"):
        got, last = gdn_prefill(q, k, v, log_decay, beta, state)
    wide = [x.astype(np.float64) for x in (q, k, v, log_decay, beta, state)]
    out, _, _, want = gdn_recurrence(*wide)
    assert error(got, out) < 1e-5 and error(last, want) < 1e-5


def test_parallel_keys():
    """The same key all the time, written with full strength: the worst matrix to invert."""
    q, k, v, log_decay, beta, state = block(96, dtype=np.float32)
    k = np.broadcast_to(k[:, :1], k.shape).copy()
    beta, log_decay = np.ones_like(beta), np.zeros_like(log_decay)
    got, last = gdn_prefill(q, k, v, log_decay, beta, state)
    out, _, _, want = gdn_recurrence(*(x.astype(np.float64) for x in (q, k, v, log_decay, beta, state)))
    assert error(got, out) < 1e-5 and error(last, want) < 1e-5


def test_torch_agrees():
    torch = pytest.importorskip("torch")
    inputs = block(70, dtype=np.float32)
    want, last = gdn_prefill(*inputs)
    got, state = gdn_prefill(*(torch.from_numpy(x) for x in inputs))
    assert error(got.numpy(), want) < 1e-6 and error(state.numpy(), last) < 1e-6


def test_chunks_are_named():
    with pytest.raises(DSpineError, match=r"chunk must be one of \(16, 32, 64, 128\), got 48"):
        gdn_prefill(*block(4), chunk=48)
