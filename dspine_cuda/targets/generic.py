"""Any other plain decoder, through `transformers`: slower than a lean decoder, and checked before it is trusted.

Loading refuses what cannot be rolled back (recurrent, hybrid and sliding-window caches), and then proves on the loaded
model that cropping the cache works, that the LM head is understood, and that every layer can be captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

from dspine.common.errors import CheckpointError, DSpineError
from dspine.common.protocols import Prefill, StageZero, TargetInfo, Verification
from dspine_cuda.arrays import TorchArrays
from dspine_cuda.caches import TransformersCache
from dspine_cuda.targets.checkpoint import TargetTensors, listed
from dspine_cuda.targets.dense import check_layer_ids

_READING = (OSError, ValueError, KeyError, RuntimeError, AttributeError, ImportError, SafetensorError)
_PROBE = 5  # tokens of the checks that run at load


def load_generic(
    folder: Path, dtype: torch.dtype, device: torch.device, make_info: Callable[[dict[str, int]], TargetInfo]
) -> GenericTarget:
    """Read the folder with `transformers`, strictly, and check that it can serve as a target."""
    TargetTensors(folder)  # a cut or missing file is found here, by name
    try:
        config = AutoConfig.from_pretrained(folder)
    except _READING as error:
        raise CheckpointError(f"{folder}: transformers does not know this model ({_line(error)})") from error
    _refuse_unsupported(config, folder)
    try:
        with _quiet():
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
            )
    except _READING as error:
        raise CheckpointError(f"{folder}: transformers cannot load this model ({_line(error)})") from error
    problems = {
        key: sorted(str(item) for item in report.get(f"{key}_keys") or ()) for key in ("missing", "unexpected", "mismatched")
    }
    if any(problems.values()):
        text = "; ".join(f"{key}: {listed(names)}" for key, names in problems.items())
        raise CheckpointError(f"{folder}: tensors do not fit config.json; {text}")
    model = model.to(device).eval().requires_grad_(False)
    facts = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "vocab_size": model.get_output_embeddings().weight.shape[0],
        "context_length": _context_length(config, folder),
    }
    return GenericTarget(folder, model, make_info(facts))


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no reports of `transformers` while a model loads: what they say is raised as one line instead."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


def _refuse_unsupported(config: Any, folder: Path) -> None:
    if config.is_encoder_decoder:
        raise CheckpointError(f"{folder}: {config.model_type} is an encoder-decoder; a target must be a plain decoder")
    if config.get_text_config() is not config:
        raise CheckpointError(f"{folder}: {config.model_type} is a multi-modal model; a target must be a plain text decoder")
    layers = DynamicCache(config=config).layers
    other = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if other:
        raise CheckpointError(
            f"{folder}: {config.model_type} keeps caches that rejected drafts cannot be removed from ({', '.join(other)}); "
            "use a plain full-attention decoder"
        )


def _context_length(config: Any, folder: Path) -> int:
    for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise CheckpointError(f"{folder}: config.json does not say the context length (max_position_embeddings)")


def find_layers(model: nn.Module, count: int, folder: Path) -> nn.ModuleList:
    """The decoder layers: the one ModuleList of `count` entries that lies least deep."""
    found = [
        (name.count("."), name, m) for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count
    ]
    least = min((depth for depth, _, _ in found), default=0)
    shallow = [(name, m) for depth, name, m in found if depth == least]
    if len(shallow) != 1:
        names = listed([name for name, _ in shallow])
        raise CheckpointError(f"{folder}: expected one list of {count} decoder layers in the model, found: {names}")
    return shallow[0][1]


class GenericTarget:
    """`protocols.Target` over a model of `transformers`. Features come from forward hooks on this instance's own layers."""

    record_routing = False  # routers are not read through `transformers`

    def __init__(self, folder: Path, model: Any, info: TargetInfo) -> None:
        self.model, self.info = model, info
        self.device = torch.device(info.device)
        self.arrays = TorchArrays(self.device)
        self.taps: tuple[int, ...] = ()
        self._captured: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        self._layers = find_layers(model, info.num_layers, folder)
        self._embedding, self._output = model.get_input_embeddings(), model.get_output_embeddings()
        parameters = inspect.signature(model.forward).parameters
        self._keeps_last = "logits_to_keep" in parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"  # renamed during transformers 5
        self._embedding_scale = 1.0
        self._head_transform = _head_transform(model.config)
        self._probe(folder)

    @torch.inference_mode()
    def _probe(self, folder: Path) -> None:
        """Check on a few tokens what the protocol promises; a model that breaks a promise is refused with the reason."""
        ids = torch.arange(_PROBE, device=self.device)[None] % self.info.vocab_size
        cache = self.make_cache(2 * _PROBE)
        before = self.finish(cache, self.begin(cache, ids), _PROBE).logits
        if cache.past.get_seq_length() != _PROBE or len(cache.past.layers) != self.info.num_layers:
            raise CheckpointError(
                f"{folder}: {self.info.model_type} does not fill a standard K/V cache, so drafts cannot be rolled back"
            )
        cache.commit(2)
        cache.check_integrity()
        after = self.finish(cache, self.begin(cache, ids[:, 2:]), _PROBE - 2).logits
        scale = float(before.abs().max())
        limit = (1e-3 if self.info.dtype == "float32" else 0.1) * max(scale, 1.0)
        if not torch.allclose(before[:, 2:], after, atol=limit, rtol=0.0):
            raise CheckpointError(
                f"{folder}: {self.info.model_type} gives other logits after its cache is cropped, so it cannot be rolled back"
            )
        output = self.model(ids, use_cache=False, output_hidden_states=True)
        states = output.hidden_states
        if not torch.allclose(self.head(states[-1]), before, atol=limit, rtol=0.0):
            raise CheckpointError(
                f"{folder}: the logits of {self.info.model_type} are not its LM head applied to the final norm's output"
            )
        self._embedding_scale = _embedding_scale(states[0], self._embedding(ids))
        self.bind_features(range(self.info.num_layers))
        self.model(ids, use_cache=False)
        for index in range(self.info.num_layers - 1):
            if not torch.equal(self._captured[index], states[index + 1]):
                raise CheckpointError(f"{folder}: layer {index} of {self.info.model_type} does not return the residual stream")
        self._unbind()

    def _unbind(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.taps = [], ()
        self._captured.clear()

    def bind_features(self, layer_ids: Sequence[int]) -> None:
        """Capture the residual stream after these layers, concatenated in this order."""
        ids = check_layer_ids(layer_ids, self.info.num_layers)
        self._unbind()
        self.taps = ids
        for index in sorted(set(ids)):
            self._hooks.append(self._layers[index].register_forward_hook(self._capture(index)))

    def _capture(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._captured[index] = output if isinstance(output, Tensor) else output[0]

        return hook

    def embed(self, tokens: Tensor) -> Tensor:
        """int [B, T] -> [B, T, H], the model's embedding scale applied (learned positions are not part of it)."""
        embedded = self._embedding(tokens)
        return embedded if self._embedding_scale == 1.0 else embedded * self._embedding_scale

    def head(self, hidden: Tensor) -> Tensor:
        """Final-normed [..., H] -> logits float32 [..., V], scale and softcap applied."""
        return self._head_transform(self._output(hidden).to(torch.float32))

    def head_rows(self, ids: Tensor) -> Tensor:
        """LM-head rows of ids int [...] -> [..., H]."""
        return nn.functional.embedding(ids, self._output.weight)

    def head_weight(self) -> np.ndarray:
        """LM head, float32 [V, H]."""
        return self._output.weight.detach().to("cpu", torch.float32).numpy()

    def make_cache(self, capacity: int, batch: int = 1) -> TransformersCache:
        """Empty cache for `batch` sequences of up to `capacity` tokens (committed plus one block)."""
        return TransformersCache(DynamicCache(config=self.model.config), capacity, batch)

    @torch.inference_mode()
    def prefill(self, cache: TransformersCache, tokens: Tensor, *, chunk: int) -> Prefill:
        """Append tokens [B, T], `chunk` at a time; see `protocols.Prefill`."""
        if chunk < 1 or tokens.shape[1] < 1:
            raise DSpineError(f"prefill needs a chunk and a prompt of at least 1 token, got {chunk} and {tokens.shape[1]}")
        pieces: list[Tensor] = []
        logits = None
        for piece in tokens.split(chunk, dim=1):
            logits, features = self._forward(cache, piece, last_only=True)
            cache.commit(piece.shape[1])
            if features is not None:
                pieces.append(features)
        assert logits is not None
        return Prefill(logits[:, -1], torch.cat(pieces, dim=1) if pieces else None)

    def begin(self, cache: TransformersCache, tokens: Tensor) -> StageZero:
        """Dense: nothing to run before the length is known."""
        return StageZero(tokens, None)

    @torch.inference_mode()
    def finish(self, cache: TransformersCache, stage: StageZero, w: int) -> Verification:
        """Run the first `w` tokens behind the committed ones; they are pending until `commit`."""
        if not 1 <= w <= stage.tokens.shape[1]:
            raise DSpineError(f"verification of {w} tokens, but the block holds {stage.tokens.shape[1]}")
        return Verification(*self._forward(cache, stage.tokens[:, :w], last_only=False))

    def commit(self, cache: TransformersCache, verification: Any, m: int) -> None:
        """Keep the first `m` tokens of the block; the rest is cropped."""
        cache.commit(m)

    def _forward(self, cache: TransformersCache, tokens: Tensor, *, last_only: bool) -> tuple[Tensor, Tensor | None]:
        if tokens.shape[0] != cache.batch:
            raise DSpineError(f"tokens of {tokens.shape[0]} sequences, but the cache holds {cache.batch}")
        cache.reserve(tokens.shape[1])
        self._captured.clear()
        keep = {"logits_to_keep": 1} if last_only and self._keeps_last else {}
        output = self.model(tokens, use_cache=True, **{self._cache_name: cache.past}, **keep)
        features = torch.cat([self._captured[i] for i in self.taps], dim=-1) if self.taps else None
        self._captured.clear()
        return output.logits.to(torch.float32), features


def _head_transform(config: Any) -> Callable[[Tensor], Tensor]:
    """What a family does to the LM head's output: scale (Granite divides, Cohere multiplies) and softcap (Gemma 2)."""
    multiply = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)

    def transform(logits: Tensor) -> Tensor:
        if multiply != 1.0:
            logits = logits * multiply
        return logits if cap is None else torch.tanh(logits / cap) * cap

    return transform


def _embedding_scale(states: Tensor, embedded: Tensor) -> float:
    """The factor between the embedding module's output and the first layer's input; 1 where they differ by more than that."""
    states, embedded = states.to(torch.float64), embedded.to(torch.float64)
    scale = float((states * embedded).sum() / (embedded * embedded).sum().clamp_min(1e-30))
    same = torch.allclose(states, scale * embedded, rtol=1e-2, atol=1e-3 * float(states.abs().max()))
    return 1.0 if not same or abs(scale - 1.0) < 1e-3 else scale
