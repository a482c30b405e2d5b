"""The shipped pairs at 8 bit: greedy text is mlx-lm's up to the first near-tie, whose margin is printed."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from dspine.common.configs import read_config
from dspine.common.decoding import DecodingLoop, DecodingParams
from dspine.common.errors import DSpineError
from dspine.common.models import resolve_draft, resolve_model
from dspine.common.selection.policies import StaticPolicy
from dspine.common.tokenizer import encode_prompt, load_tokenizer
from dspine_mlx.drafter import load_drafter
from dspine_mlx.targets import wrap_model
from dspine_mlx.targets.layouts import load_options

MARGIN = 0.25  # of the two best logits: rounding alone was never seen to turn more


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("smollm2", 10), ("hybrid-tiny", 24)])
def test_text_is_mlx_lms(name, count):
    try:
        folder, draft = resolve_model(name), resolve_draft("auto", name)
    except DSpineError as error:
        pytest.skip(str(error))
    model, config = load_model(folder, **load_options(read_config(folder)))
    fits = lambda path, layer: hasattr(layer, "to_quantized") and layer.weight.shape[-1] % 64 == 0  # noqa: E731
    nn.quantize(model, 64, 8, class_predicate=fits)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    target = wrap_model(model, config | {"quantization": {"bits": 8, "group_size": 64}}, name=name)
    ids = encode_prompt(load_tokenizer(folder), "def is_prime(n):\n", limit=2000, raw=True)  # short: reading is slow here
    expected = [int(token) for token, _ in generate_step(mx.array(ids), model, max_tokens=count)]
    loop = DecodingLoop(target, load_drafter(draft, target), ids, DecodingParams(max_tokens=count), StaticPolicy())
    got = [event.token for event in loop.run()]
    assert loop.stats.accepted_tokens > 0
    at = next((i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b), None)
    if at is not None:
        logits = model(mx.array([ids + expected[:at]]))[0, -1]
        best, second = sorted(logits.tolist())[:-3:-1]
        print(f"{name}: token {at} differs, margin of the two best {best - second:.3f}")
        assert best - second < MARGIN
