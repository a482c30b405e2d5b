"""CPU versions of core operations against the core's own code."""

from __future__ import annotations

import pytest
import torch

from dspine.common.errors import DSpineError
from dspine.common.gdn import gdn_verify
from dspine.common.injection import InjectionWeights
from dspine.common.registry import kernel_report
from dspine.common.transition import path_walk, transition_scores
from dspine_cuda import cpu_ops
from dspine_cuda.drafter import RMSNorm
from dspine_cuda.ops import register


def weights(rank: int, message: int, hidden: int, dtype: torch.dtype, generator: torch.Generator) -> InjectionWeights:
    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    return InjectionWeights(
        draw(rank, hidden), draw(hidden, message), draw(message, rank), draw(message, rank), draw(message, rank), draw(message)
    )


@pytest.mark.parametrize("lead", [(), (1,), (2, 3)])
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)])
def test_transition_scores(lead, dtype, bound):
    generator = torch.Generator().manual_seed(0)
    m, k, rank, message, hidden = 5, 4, 12, 7, 36
    exact = weights(rank, message, hidden, dtype, generator)
    u, codes, rows = (
        torch.randn(*lead, *shape, generator=generator).to(dtype) for shape in ((m, hidden), (m, k, rank), (m, k, hidden))
    )
    u.view(-1, hidden)[0] = 0  # a row of zeros must not make NaN
    norm = RMSNorm(hidden, 1e-6).to(dtype)
    with torch.inference_mode():
        got = cpu_ops.transition_scores(u, codes, rows, exact, norm)
        wide = InjectionWeights(*(getattr(exact, name).double() for name in exact.__dataclass_fields__))
        want = transition_scores.reference(u.double(), codes.double(), rows.double(), wide, norm.double())
    assert got.dtype == torch.float32 and got.shape == (*lead, m, k, k)
    assert (got.double() - want).norm() / want.norm() <= bound


@pytest.mark.parametrize("lead", [(), (1,), (7, 2)])
def test_path_walk(lead):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(*lead, 6, 5, 5, generator=generator)
    candidates = torch.randint(0, 1000, (*lead, 6, 5), generator=generator)
    assert torch.equal(cpu_ops.path_walk(scores, candidates), path_walk.reference(scores, candidates))


def test_they_are_registered_for_the_cpu_only():
    register()
    report = kernel_report()
    assert (
        report["path_walk/torch/cpu"] == "torch path_walk"
        and report["transition_scores/torch/cpu"] == "torch transition_scores"
    )


@pytest.mark.parametrize("count", [1, 5, 16])
def test_n2_a_decay_that_is_no_log_is_refused(count):
    """The decay passed instead of its log: said in one line at every length; padding is nobody's decay."""
    register()
    assert "gdn_verify/torch/cpu" in kernel_report()
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2, count, 2, 8, generator=generator).div_(8)
    v, state = torch.randn(2, count, 4, 6, generator=generator), torch.zeros(2, 4, 6, 8)
    decay = torch.full((2, count, 4), 0.97)
    with pytest.raises(DSpineError, match=r"log_decay must be at most 0, got 0\.97.*pass log\(decay\)"):
        gdn_verify(q, k, v, decay, decay, state)
    live = torch.tensor([0, count - 1], dtype=torch.int32)
    padded = decay.log()
    padded[0], padded[1, count - 1] = 0.97, 0.97
    assert bool(gdn_verify(q, k, v, padded, decay, state, live)[0].isfinite().all())
