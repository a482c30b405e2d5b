"""Static rounds over the Triton kernels: every operation of a round gets arguments that its kernel takes, and the text is that
of the core's own operations. Interpreted where there is no GPU (float32, a few rounds)."""

from __future__ import annotations

import importlib

import pytest
import torch

from dspine.common import registry
from dspine.common.sampling import SamplingParams
from dspine.common.selection.policies import parse_policy
from dspine_cuda import ops
from dspine_cuda.drafter import load_drafter
from dspine_cuda.graphs import PLAIN, POLICY, EagerRunner
from dspine_cuda.runtime import RUNTIME
from dspine_cuda.static.arena import Arena, ArenaShape
from dspine_cuda.static.loop import GraphDecoder
from dspine_cuda.static.round import RoundRules, StaticRound, read_report
from tests.helpers.drafters import drafter_folder
from tests.helpers.hybrids import save_hybrid
from tests.helpers.models import one_thread, prompt, save_tiny
from tests.torch.test_static_loop import routed_calibration

WIDTH = 8
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACCEPT = ("accept_greedy", "accept_point_mass", "accept_point_mass_logits", "accept_rejection_logits")
STEPS = ("table_rows", "enter_block", "round_uniforms", "round_limits", "place_drafts", "bound_lengths")
ROUNDS = 8 if DEVICE == "cuda" else 1  # the interpreter takes seconds a round


def noted(ran, name, function):
    """`function`, which writes its name into `ran` when it is called."""

    def run(*args, **kwargs):
        ran.add(name)
        return function(*args, **kwargs)

    return run


@pytest.fixture
def kernels(monkeypatch):
    """The Triton kernels registered for this machine's device, and the names of those that ran."""
    ran = set()
    monkeypatch.setattr(registry, "_kernels", dict(registry._kernels))
    for name in ops._TRITON_KERNELS:
        module = importlib.import_module(f"dspine.kernels_triton.{name}")
        names = {"accept": ACCEPT, "gdn_verify": ("gdn_verify", "gdn_verify_deferred"),
                 "draft_signals": ("draft_signals", "draft_candidates"), "stepping": STEPS,
                 "attention_inputs": ("attention_inputs", "context_inputs"),
                 "path_walk": ("path_walk", "path_walk_sampled")}.get(name, (name,))  # fmt: skip
        for each in names:
            run = noted(ran, each, getattr(module, each))
            registry.register_kernel(each, namespace="torch", device=DEVICE, function=run, name=f"triton {each}")
    return ran


@pytest.fixture(scope="module", params=["qwen3", "qwen3_5_moe_text"])
def pair(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    (save_tiny if request.param == "qwen3" else save_hybrid)(folder / "t", request.param)
    target = RUNTIME.load_target(folder / "t", device=DEVICE, dtype="float32")
    made = drafter_folder(folder / "d", "dspine", WIDTH, target.head_weight(), 5, head_dim=16)
    return target, load_drafter(made, target)


def reports(pair, mode, rules, count):
    target, drafter = pair
    arena = Arena(target, drafter, ArenaShape(40, 1, WIDTH))
    text = prompt(8, seed=4).to(target.device)
    with torch.inference_mode():
        drafter.commit(arena.draft_cache, target.prefill(arena.cache, text[:, :7], chunk=8).features)
    arena.start([7], [int(text[0, 7])], [30], frozenset(), torch.rand(1, 40, 3, generator=torch.Generator().manual_seed(1)))
    runner, found = EagerRunner(StaticRound(target, drafter, arena, rules)), []
    for _ in range(count):
        runner.launch(mode)
        found.append(read_report(runner.wait()[0]))
    return found


CASES = [
    (WIDTH, "greedy", {"accept_greedy", "block_attention", "candidate_scores", "path_walk", "draft_candidates"}),
    (3, "rejection", {"path_walk_sampled", "accept_rejection_logits"}),
    (PLAIN, "point-mass", {"accept_point_mass_logits"}),
    (4, "point-mass", {"accept_point_mass_logits"}),
    (POLICY, "greedy", {"select_length", "draft_signals"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rule", "names"), CASES)
def test_rounds_over_the_kernels(pair, kernels, mode, rule, names):
    target, drafter = pair
    hybrid = hasattr(target, "layers") and hasattr(target.config, "gdn")
    sampling = SamplingParams(temperature=0.0 if rule == "greedy" else 0.9)
    tables = None
    if mode == POLICY:
        policy = parse_policy("hybridspec", routed_calibration())
        tables = GraphDecoder(target, drafter, make_runner=EagerRunner)._on_device(policy)
    rules = RoundRules(rule, sampling, tables, corrected=hybrid and tables is not None)
    with one_thread():
        got = reports(pair, mode, rules, ROUNDS)
        with registry.reference_only():
            want = reports(pair, mode, rules, ROUNDS)
    assert got == want
    expected = names | ({"gdn_round", "gdn_keep", "pick_experts", "routed_experts", "sigmoid_mul"} if hybrid else set())
    expected |= {"correct_length"} if mode == POLICY and hybrid else set()
    expected |= set(STEPS[3:5]) | {"table_rows"} | ({"enter_block", "context_inputs"} if mode != PLAIN else set())
    expected |= {"bound_lengths"} if mode == POLICY else {"round_uniforms"} if rule != "greedy" else set()
    expected |= {"attention_inputs", "add_rms_norm", "settle_round"} | (set() if hybrid else {"gated_rows"})
    expected |= {"injection_messages", "injection_write", "gated_rows"} if mode != PLAIN else set()
    assert expected <= kernels
