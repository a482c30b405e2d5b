"""Static drafting run eagerly on the CPU against the eager drafter: every kind, windows, several slots, partial commits."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from dspine.common import registry  # noqa: E402
from dspine.common.protocols import DraftRequest  # noqa: E402
from dspine_cuda.drafter import load_drafter  # noqa: E402
from dspine_cuda.runtime import RUNTIME  # noqa: E402
from dspine_cuda.static.arena import Arena, ArenaShape  # noqa: E402
from dspine_cuda.static.drafter import StaticDrafter, refusal  # noqa: E402
from tests.helpers.drafters import KINDS, drafter_folder  # noqa: E402
from tests.helpers.models import one_thread, prompt, save_tiny  # noqa: E402

WIDTH, PAST = 6, 9
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8, "use_sliding_window": True}
CASES = [*((kind, {}) for kind in KINDS), ("dspine", SLIDING), ("dflash", SLIDING)]
BEYOND = {"transfer_rank": 8, "message_size": 6, "top_k": 4}
CASES += [("dspine", {"dspine_config": BEYOND | more}) for more in ({"hops": 2}, {"refined_layers": 2})]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    with one_thread():
        yield


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_tiny(folder, "qwen3")
    return RUNTIME.load_target(folder, device="cpu", dtype="float32")


def close(got, want):
    torch.testing.assert_close(got, want, atol=3e-5 * max(float(want.abs().max()), 1e-3), rtol=0)


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_states_and_context_are_the_eager_ones(target, tmp_path, kind, changes):
    """Two slots, the second one round of 1 to 6 committed tokens ahead or behind: states, context K/V and drafts."""
    drafter = load_drafter(drafter_folder(tmp_path, kind, WIDTH, target.head_weight(), 5, head_dim=16, **changes), target)
    assert refusal(drafter) is None
    arena = Arena(target, drafter, ArenaShape(64, 2, WIDTH))
    static, caches = StaticDrafter(drafter, arena), [drafter.make_cache(64) for _ in range(2)]
    generator = torch.Generator().manual_seed(3)
    width = drafter.config.feature_size
    features = torch.randn(2, PAST, width, generator=generator)
    for slot, cache in enumerate(caches):
        drafter.commit(cache, features[slot : slot + 1])
        arena.draft_cache._store[:, :, slot, :, :PAST] = cache.rows(PAST)[:, :, 0]
    arena.start([PAST] * 2, [0, 0], [40, 40], frozenset(), None)
    for turn, counts in enumerate(((1, 6), (4, 0), (6, 2), (3, 3))):
        anchors = prompt(2, seed=turn)[0]
        arena.anchor.copy_(anchors)
        states, code = [], []
        for slot, cache in enumerate(caches):
            made, known = drafter._run(cache, anchors[slot : slot + 1])
            states.append(made)
            code.append(known)
        found = {}

        def keep(given, known, anchor, request, found=found):
            found["states"] = given
            return type(drafter).proposal(drafter, given, known, anchor, request)

        drafter.proposal = keep
        proposal = static.propose(DraftRequest(signals=True))
        del drafter.proposal
        for name in ("hidden", "pre_injection"):
            close(getattr(found["states"], name), torch.cat([getattr(made, name) for made in states]))
        for slot in range(2):
            alone = drafter.proposal(states[slot], code[slot], anchors[slot : slot + 1], DraftRequest(signals=True))
            assert proposal.tokens[slot].tolist() == alone.tokens[0].tolist()
        block = torch.randn(2, WIDTH, width, generator=generator)
        static.commit(block, torch.tensor(counts, dtype=torch.int32), arena.lengths)
        arena.lengths += torch.tensor(counts, dtype=torch.int32)
        for slot, (cache, count) in enumerate(zip(caches, counts, strict=True)):
            if count:
                drafter.commit(cache, block[slot : slot + 1, :count])
            close(arena.draft_cache._store[:, :, slot, :, : cache.length], cache.rows(cache.length)[:, :, 0])
            assert int(arena.lengths[slot]) == cache.length


def test_context_where_the_kernel_of_all_layers_declines(target, tmp_path, monkeypatch):
    """The core's own code then writes nothing in place: its answer is taken all the same, of every layer."""
    drafter = load_drafter(drafter_folder(tmp_path, "dspine", WIDTH, target.head_weight(), 5, head_dim=16), target)
    features, stores = torch.randn(2, WIDTH, drafter.config.feature_size, generator=torch.Generator().manual_seed(5)), []
    for declines in (False, True):
        if declines:
            monkeypatch.setattr(registry, "_kernels", dict(registry._kernels))
            registry.register_kernel(
                "context_inputs", namespace="torch", device="cpu", function=None, name="none", supports=lambda *args: False
            )
        arena = Arena(target, drafter, ArenaShape(64, 2, WIDTH))
        arena.draft_cache._store.zero_()  # whatever lay in that memory is compared as well
        arena.start([PAST] * 2, [0, 0], [40, 40], frozenset(), None)
        StaticDrafter(drafter, arena).commit(features, torch.tensor([4, 0], dtype=torch.int32), arena.lengths)
        stores.append(arena.draft_cache._store[..., :-1, :])
    assert stores[0][:, :, 0, :, PAST : PAST + 4].abs().sum(dim=(1, 2, 3, 4)).all()
    close(stores[1], stores[0])
