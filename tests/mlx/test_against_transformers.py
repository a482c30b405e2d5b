"""A second third party: the same folder in transformers and on MLX gives the same logits and the same features."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from dspine_mlx.targets import load_target
from tests.mlx.goldens import ids

torch = pytest.importorskip("torch", reason="transformers needs torch to run a model")
transformers = pytest.importorskip("transformers")

TOKENS = [3, 5, 7, 11, 13, 17, 19, 2, 4]
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "vocab_size": 96, "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_c2_features_are_hidden_states_one_later(name, tmp_path):
    """Layer id i is the OUTPUT of layer i: `hidden_states[i + 1]` (index 0 is the embedding), raw, before the final norm."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SHAPE, rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 1.2 / parameter.shape[-1] ** 0.5)
        model.save_pretrained(tmp_path)
        want = model(torch.tensor([TOKENS]), output_hidden_states=True)
    target = load_target(tmp_path)
    target.bind_features([0, 2, 1])
    cache = target.make_cache(16)
    first = target.prefill(cache, ids([TOKENS[:4]]), chunk=3)
    verification = target.finish(cache, target.begin(cache, ids([TOKENS[4:]])), 5)
    features = np.array(mx.concatenate([first.features, verification.features], axis=1))
    hidden = torch.cat([want.hidden_states[i + 1] for i in (0, 2, 1)], dim=-1).numpy()
    np.testing.assert_allclose(features, hidden, atol=1e-4, rtol=1e-4)
    logits = want.logits.numpy()
    np.testing.assert_allclose(np.array(first.logits), logits[:, 3], atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(np.array(verification.logits), logits[:, 4:], atol=1e-4, rtol=1e-4)
