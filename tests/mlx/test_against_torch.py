"""One checkpoint, two runtimes: the MLX and the torch drafter give the same hidden states, logits and drafts."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from dspine.common.protocols import DraftRequest, TargetInfo
from dspine_mlx.drafter import load_drafter
from tests.mlx.goldens import ids
from tests.mlx.toys import HIDDEN, LAYERS, VOCAB, drafter_folder

torch = pytest.importorskip("torch", reason="torch is not installed")
torch_drafter = pytest.importorskip("dspine_cuda.drafter")

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
BEYOND = {"transfer_rank": 8, "message_size": 6, "top_k": 4}
CASES = [
    ("dspine", {}),
    ("dspine", {"rope_scaling": YARN} | SLIDING),
    ("dspine", {"is_causal": True} | SLIDING),
    ("dspine", {"dspine_config": BEYOND | {"hops": 2}}),
    ("dspine", {"dspine_config": BEYOND | {"refined_layers": 2}}),
    ("dspine", {"dspine_config": BEYOND | {"hops": 2, "refined_layers": 2}}),
    ("dflash", {"rope_scaling": YARN, "attention_bias": True}),
    ("dflash", SLIDING),
    ("dflash", {"is_causal": False} | SLIDING),
]


def target_of(embed, head, widen, head_array) -> SimpleNamespace:
    info = TargetInfo("toy", "toy", LAYERS, HIDDEN, VOCAB, 512, frozenset(), "float32", "cpu", "toy")
    return SimpleNamespace(
        info=info,
        embed=lambda tokens: embed[tokens],
        head=lambda hidden: widen(hidden @ head.T),
        head_rows=lambda tokens: head[tokens],
        head_weight=lambda: head_array,
        bind_features=lambda layer_ids: None,
    )


@pytest.mark.parametrize("method, changes", CASES)
def test_one_checkpoint_two_runtimes(method, changes, tmp_path):
    rng = np.random.default_rng(1)
    embed, head = (rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32) for _ in range(2))
    folder = drafter_folder(tmp_path / "d", method, 8, head, **changes)
    on_mlx = load_drafter(folder, target_of(mx.array(embed), mx.array(head), lambda x: x, head))
    on_torch = torch_drafter.load_drafter(folder, target_of(*map(torch.from_numpy, (embed, head)), lambda x: x, head))
    features = rng.normal(size=(1, 33, 2 * HIDDEN)).astype(np.float32)
    uniforms = rng.random((1, 7)).astype(np.float32)
    caches = on_mlx.make_cache(64), on_torch.make_cache(64)
    for start, stop, anchor in ((0, 20, 4), (20, 21, 9), (21, 33, 50)):
        on_mlx.commit(caches[0], mx.array(features[:, start:stop]))
        on_torch.commit(caches[1], torch.from_numpy(features[:, start:stop].copy()))
        left, right = ids([anchor]), torch.tensor([anchor])
        for request in ({}, {"temperature": 0.8}):
            draws = ({"uniforms": mx.array(uniforms)}, {"uniforms": torch.from_numpy(uniforms)}) if request else ({}, {})
            a = on_mlx.propose(caches[0], left, DraftRequest(signals=True, **request, **draws[0]))
            b = on_torch.propose(caches[1], right, DraftRequest(signals=True, **request, **draws[1]))
            np.testing.assert_array_equal(np.array(a.tokens), b.tokens.numpy())
            for name in ("confidence", "entropy", *(("q",) if request else ())):
                np.testing.assert_allclose(np.array(getattr(a, name)), getattr(b, name).numpy(), atol=2e-5, err_msg=name)
            if request:
                np.testing.assert_array_equal(np.array(a.candidates), b.candidates.numpy())
