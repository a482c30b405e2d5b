"""Engines of a tiny real pair whose words are token ids, with static rounds or without, as `dspine serve` takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspine.common.generation import load
from dspine.common.protocols import Engine
from dspine.common.runtimes import choose_runtime
from dspine.common.tokenizer import load_tokenizer
from dspine_cuda.graphs import EagerRunner
from dspine_cuda.static.loop import GraphDecoder
from tests.helpers.drafters import drafter_folder
from tests.helpers.hybrids import save_hybrid
from tests.helpers.models import VOCAB, save_tiny

WORDS = " ".join(f"w{n}" for n in (5, 9, 11, 4, 21, 33, 7, 8, 60, 12, 31, 17))
CONTEXT = 96


def engine_maker(root: Path, family: str) -> Callable[..., Engine]:
    """make(static, runner) -> a fresh engine, with static rounds or without."""
    save = save_tiny if family == "qwen3" else save_hybrid
    model = save(root / "target", family, max_position_embeddings=CONTEXT)
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="w0", eos_token="w2")
    backend.save_pretrained(root / "target")
    backend.save_pretrained(root / "words")  # beside no config.json: a family's own class would cut words its own way
    head = model.get_output_embeddings().weight.detach().float().numpy()
    drafter_folder(root / "draft", "dspine", 6, head, model.config.num_hidden_layers, head_dim=16)
    runtime, reason = choose_runtime("torch")

    def make(static, runner=EagerRunner):
        engine = load(runtime, str(root / "target"), str(root / "draft"), device="cpu", dtype="float32", backend_reason=reason)
        engine.tokenizer = load_tokenizer(root / "words")
        if static:
            engine.rounds = GraphDecoder(engine.target, engine.drafter, make_runner=runner)
            engine.rounds_reason = "steps without graphs"
        return engine

    return make
