"""The torch runtime on CUDA: goldens, greedy text against the CPU and plain decoding, core code inside a CUDA graph."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspine.common.acceptance import accept_greedy, accept_point_mass, accept_rejection
from dspine.common.decoding import DecodingParams, decode
from dspine.common.injection import InjectionWeights, inject
from dspine.common.protocols import DraftRequest, TargetInfo
from dspine.common.sampling import SamplingParams, penalise, sample_index, token_probabilities
from dspine.common.transition import path_walk, path_walk_sampled, transition_scores
from dspine_cuda.drafter import RMSNorm, load_drafter
from dspine_cuda.targets.load import load_target
from tests.helpers.drafters import Prompted, drafter_folder
from tests.helpers.goldens import assert_golden, golden_arrays, golden_folder, golden_target
from tests.helpers.models import greedy_reference, save_tiny

PROMPT = [3, 5, 7, 11, 13]
MARGIN = 0.25  # case S3, tier 2: two best scores closer than this may change places


def golden_model_target(case: str) -> SimpleNamespace:
    arrays = {name: torch.from_numpy(array).cuda() for name, array in golden_target(case).items()}
    embed, head = arrays["embed_tokens"], arrays["lm_head"]
    return SimpleNamespace(
        info=TargetInfo("golden", "toy", 8, embed.shape[1], 128, 512, frozenset(), "float32", "cuda", "toy"),
        embed=lambda ids: embed[ids],
        head=lambda hidden: hidden @ head.T,
        head_rows=lambda ids: head[ids],
        head_weight=lambda: golden_target(case)["lm_head"],
        bind_features=lambda ids: None,
    )


@pytest.mark.parametrize("case", ["dflash", "dflash_sliding", "dflash_sliding_noncausal"])
def test_dflash_goldens(case, tmp_path):
    drafter, io = load_drafter(golden_folder(case, tmp_path), golden_model_target(case)), golden_arrays(case)
    cache, done = drafter.make_cache(64), 0
    for r, start in enumerate(io["starts"]):
        drafter.commit(cache, torch.from_numpy(io["features"][None, done:start]).cuda())
        done = int(start)
        anchor = torch.from_numpy(io["anchors"][r : r + 1]).long().cuda()
        states, _ = drafter._run(cache, anchor)
        assert_golden(states.hidden[0, 0].cpu(), io["hidden"][r], f"hidden of round {r}")
        assert_golden(drafter.propose(cache, anchor, DraftRequest()).tokens[0].cpu(), io["proposals"][r], "proposals")


def test_dspine_goldens(tmp_path):
    drafter, io = load_drafter(golden_folder("dspine", tmp_path), golden_model_target("dspine")), golden_arrays("dspine")
    for b, anchor in enumerate(io["anchor_positions"]):
        cache = drafter.make_cache(64)
        drafter.commit(cache, torch.from_numpy(io["features"][None, :anchor]).cuda())
        ids = torch.from_numpy(io["block_token_ids"][b, :1]).long().cuda()
        states, code = drafter._run(cache, ids)
        assert_golden(states.hidden[0, 0].cpu(), io["hidden"][b], "hidden")
        candidates = torch.from_numpy(io["candidates"][b]).long().cuda()[None]
        scores = drafter.transition(states.pre_injection[:, 0, 1:], code, candidates)
        assert_golden(scores[0].detach().cpu(), io["transition_scores"][b], "transition scores")
        assert_golden(drafter.propose(cache, ids, DraftRequest()).tokens[0].cpu(), io["greedy_path"][b], "greedy path")


@pytest.mark.parametrize("case", ["dflash2", "domino_shift", "domino_noshift", "dspark_vanilla", "dspark_gated", "dspark_rnn"])
def test_family_goldens(case, tmp_path):
    """Hidden states within 1e-5 and the same greedy drafts as the authors' code; confidences of DSpark too."""
    drafter, io = load_drafter(golden_folder(case, tmp_path), golden_model_target(case)), golden_arrays(case)
    one = "anchors" not in io  # a single round over all features
    anchors, starts = (io["anchor"], [len(io["features"])]) if one else (io["anchors"], io["starts"])
    want = io["greedy_path"] if case == "dflash2" else io["proposals"]
    cache, done = drafter.make_cache(64), 0
    for r, start in enumerate(starts):
        drafter.commit(cache, torch.from_numpy(io["features"][None, done:start]).cuda())
        done, anchor = int(start), torch.from_numpy(anchors[r : r + 1]).long().cuda()
        with torch.inference_mode():
            states, _ = drafter._run(cache, anchor)
            proposal = drafter.propose(cache, anchor, DraftRequest(signals=True))
        assert_golden(states.hidden[0, 0].cpu(), io["hidden"] if one else io["hidden"][r], "hidden")
        assert_golden(proposal.tokens[0].cpu(), want if one else want[r], "greedy drafts")
        if case.startswith("dspark"):
            assert_golden(proposal.confidence[0].cpu(), io["confidence"][r], "confidence")


def assert_same_or_tie(target: Any, got: list[int], want: list[int], prompt: list[int]) -> None:
    """Tier 2: equal, or parted where the target's two best scores lie closer than MARGIN."""
    for i, (a, b) in enumerate(zip(got, want, strict=False)):
        if a != b:
            cache = target.make_cache(len(prompt) + i + 1)
            ids = torch.tensor([[*prompt, *want[:i]]], device=target.info.device)
            best = torch.topk(target.prefill(cache, ids, chunk=512).logits[0], 2).values
            margin = float(best[0] - best[1])
            assert margin < MARGIN, f"token {i}: {a} against {b}, the two best scores are {margin:.3f} apart"
            return


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("method", ["dspine", "dflash"])
@pytest.mark.parametrize("block", [2, 5, 8, 16])
def test_greedy_equals_transformers(family, method, block, tmp_path):
    model = save_tiny(tmp_path / "t", family)
    text = greedy_reference(model, torch.tensor([PROMPT]), 144)
    target = load_target(tmp_path / "t", device="cuda", dtype="float32")
    drafter = load_drafter(drafter_folder(tmp_path / "d", method, block, target.head_weight(), 5), target)
    for used in (None, Prompted(drafter, PROMPT, text, wrong_every=5)):
        params = DecodingParams(max_tokens=128, break_even=0.0)
        tokens = [event.token for event in decode(target, used, PROMPT, params)]
        assert_same_or_tie(target, tokens, text[:128], PROMPT)


def test_embedded_model_in_bfloat16():
    """The shipped pair on the GPU: speculative against plain, tier 2, and drafts that are really accepted."""
    from dspine.common.errors import DSpineError
    from dspine.common.generation import generate, load
    from dspine.common.tokenizer import encode_prompt
    from dspine_cuda.runtime import RUNTIME

    try:
        engine = load(RUNTIME, "smollm2", device="cuda")
    except DSpineError as error:
        pytest.skip(str(error))
    for prompt in ("What is the capital of France?", "Write a Python function that adds two numbers."):
        drafted = generate(engine, prompt, max_tokens=96)
        plain = generate(engine, prompt, max_tokens=96, draft=False)
        assert drafted.stats.mean_acceptance_length > 1.5
        if drafted.token_ids != plain.token_ids:
            encoded = encode_prompt(engine.tokenizer, prompt, limit=engine.target.info.context_length)
            assert_same_or_tie(engine.target, drafted.token_ids, plain.token_ids, [int(t) for t in encoded])


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).cuda()


def captured(function: Any) -> list[torch.Tensor]:
    """Outputs of a CUDA graph of `function`: capture fails on any host read or data-dependent shape."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function()
    graph.replay()
    torch.cuda.synchronize()
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


M, K, H, R, A, V = 5, 4, 32, 8, 6, 301
WEIGHTS = (("readout", (R, H)), ("write", (H, A)), ("message", (A, R)), ("receiver_gate", (A, R)), ("predecessor_gate", (A, R)))


def core_calls() -> dict[str, Any]:
    weights = InjectionWeights(**{name: draw(*shape) for name, shape in WEIGHTS}, bias=draw(A))
    norm = RMSNorm(H, 1e-6).cuda()
    u, code = draw(2, M + 1, H), draw(2, R)
    scores, ids = draw(2, M, K, K), torch.randint(0, V, (2, M, K), generator=torch.Generator().manual_seed(1)).cuda()
    uniforms = torch.rand(2, M + 1, generator=torch.Generator().manual_seed(2)).cuda()
    logits, draft, limit = draw(2, M + 1, V), ids[..., 0], torch.full((2,), M, dtype=torch.int32, device="cuda")
    q = torch.softmax(scores[..., 0, :], -1)
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02)
    penalties = SamplingParams(presence_penalty=0.5, frequency_penalty=0.2, repetition_penalty=1.1)
    counts = torch.zeros(2, V, device="cuda")
    block = torch.cat([draft[:, :1], draft], dim=1)
    p = torch.softmax(logits, -1)
    codes, rows = draw(2, M, K, R), draw(2, M, K, H)

    def verdict(v: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return v.accepted, v.next_token

    return {
        "inject": lambda: inject(u, code, weights),
        "transition_scores": lambda: transition_scores(u[:, 1:], codes, rows, weights, norm).detach(),
        "path_walk": lambda: path_walk(scores, ids),
        "path_walk_sampled": lambda: path_walk_sampled(scores, ids, uniforms[:, :M], 0.7),
        "accept_greedy": lambda: verdict(accept_greedy(logits, draft, limit)),
        "accept_point_mass": lambda: verdict(accept_point_mass(p, draft, limit, uniforms[:, :M], uniforms)),
        "accept_rejection": lambda: verdict(accept_rejection(p, draft, limit, ids, q, uniforms[:, :M], uniforms)),
        "token_probabilities": lambda: token_probabilities(logits, params),
        "sample_index": lambda: sample_index(p, uniforms),
        "penalise": lambda: penalise(logits, block, counts, counts, penalties),
    }


NAMES = """inject transition_scores path_walk path_walk_sampled accept_greedy accept_point_mass accept_rejection
token_probabilities sample_index penalise"""


@pytest.mark.parametrize("name", NAMES.split())
def test_core_is_sync_free(name):
    """Captured in a CUDA graph and replayed: the same as the eager call."""
    function = core_calls()[name]
    with torch.no_grad():
        eager = function()
        eager = list(eager) if isinstance(eager, tuple) else [eager]
        replayed = captured(function)
    for want, got in zip(eager, replayed, strict=True):
        torch.testing.assert_close(got, want)
