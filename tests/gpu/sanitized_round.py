"""One captured round of a tiny hybrid with experts and its drafter, for `compute-sanitizer`: no pytest, no transformers.

    python -m tests.gpu.sanitized_round make FOLDER     the model and the drafter; then one round, which fills Triton's cache
    compute-sanitizer --tool memcheck --kernel-regex kns=_kernel python -m tests.gpu.sanitized_round run FOLDER

The first command keeps what is slow under the sanitizer (compiling, transformers) out of the second; `make test-sanitizer` runs
both. A round is draft, both stages, acceptance and commit; the replay's report is held to the same steps launched one by one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from dspine_cuda.drafter import load_drafter
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.static.arena import Arena, ArenaShape
from dspine_cuda.static.round import Report, StaticRound, read_report

WIDTH, CAPACITY = 4, 64
PROMPT = [5, 9, 11, 4, 21, 7, 30, 2]


def make(folder: Path, device: str) -> None:
    """Random weights of both, as folders."""
    from tests.helpers.drafters import drafter_folder
    from tests.helpers.hybrids import save_hybrid

    save_hybrid(folder / "target", "qwen3_5_moe_text")
    head = RUNTIME.load_target(folder / "target", device=device, dtype="float32").head_weight()
    drafter_folder(folder / "drafter", "dspine", WIDTH, head, 5, head_dim=16)


def begin(target: Any, drafter: Any, arena: Arena) -> None:
    """The prompt but its last token in the caches, that one as anchor."""
    text = torch.tensor([PROMPT], device=target.device)
    arena.rewind()
    drafter.commit(arena.draft_cache, target.prefill(arena.cache, text[:, :-1], chunk=8).features)
    arena.start([len(PROMPT) - 1], [PROMPT[-1]], [20], frozenset(), None)


def reports(folder: Path, device: str) -> tuple[Report, Report]:
    """(of the steps one by one, of a graph's replay) of the same round; twice the first without CUDA."""
    target = RUNTIME.load_target(folder / "target", device=device, dtype="bfloat16" if device == "cuda" else "float32")
    drafter = load_drafter(folder / "drafter", target)
    arena = Arena(target, drafter, ArenaShape(CAPACITY, 1, WIDTH))
    round_ = StaticRound(target, drafter, arena)

    def read() -> Report:
        return read_report(arena.report[0].cpu().numpy())

    with torch.inference_mode():
        begin(target, drafter, arena)
        round_.drafted(WIDTH)
        first = read()
        if device != "cuda":
            begin(target, drafter, arena)
            round_.drafted(WIDTH)
            return first, read()
        arena.rewind()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            round_.drafted(WIDTH)
        begin(target, drafter, arena)
        graph.replay()
        return first, read()


def main() -> int:
    """Command line; 0 where both reports agree and tokens came out."""
    if len(sys.argv) != 3 or sys.argv[1] not in ("make", "run"):
        print(__doc__, file=sys.stderr)
        return 2
    device, folder, started = "cuda" if torch.cuda.is_available() else "cpu", Path(sys.argv[2]), perf_counter()
    if sys.argv[1] == "make":
        make(folder, device)
    one_by_one, replayed = reports(folder, device)
    same = one_by_one == replayed and len(replayed.tokens) > 0
    verdict = "the same" if same else f"DIFFERENT: {one_by_one} and {replayed}"
    print(f"a round on {device}: {len(replayed.tokens)} tokens, {verdict}; {perf_counter() - started:.0f} s")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
