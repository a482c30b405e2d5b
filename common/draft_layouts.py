"""Tensor names of the drafter family: what each method's own parts are called, the aliases in use, and what a file may
carry of the target's (`docs/checkpoints.md`). Names and shapes only; bytes are `checkpoints.py`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dspine.common.configs import DrafterConfig

Shape = tuple[int, ...]
_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
    "candidate_selector.predecessor_codebook.weight": "candidate_selector.predecessor_codebook",
    "candidate_selector.successor_codebook.weight": "candidate_selector.successor_codebook",
}
_HEADS = ("prefix_gru.", "embed_proj.", "markov_head.", "confidence_head.")
BORROWED = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")  # [V, H], the target's own
MAPS = ("t2d", "d2t")  # which of the target's tokens a drafter may propose; draft id -> how far its target id lies ahead
_REBUILT = ("rotary_emb.inv_freq", "verifier_norm.weight")  # made at load, or used in training only
KIND_MARKS = {
    "injection.": "dspine",
    "candidate_selector.": "dflash2",
    "prefix_gru.": "domino",
    "embed_proj.": "domino",
    "markov_head.": "dspark",
    "confidence_head.": "dspark",
}


def canonical_name(name: str) -> str | None:
    """The name this project uses for a stored tensor; None for tensors that are rebuilt and never read."""
    name = name.removeprefix("model.")
    if name.startswith("logit_head.") and name.removeprefix("logit_head.").startswith(_HEADS):
        name = name.removeprefix("logit_head.")
    if name in _REBUILT or name.endswith(".rotary_emb.inv_freq"):
        return None
    return _ALIASES.get(name, name)


def head_tensors(config: DrafterConfig) -> dict[str, Shape]:
    """Name -> shape of what the method adds to the backbone (DSpine's injection is `checkpoints.expected_tensors`')."""
    hidden, vocab, shapes = config.hidden_size, config.vocab_size, {}
    if config.conv is not None:
        taps, groups = config.conv.kernel_size, hidden // config.conv.group_size
        for i in range(config.num_layers):
            for part in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{part}.base_kernel"] = (2, taps, hidden)
                shapes[f"layers.{i}.{part}.kernel_projection.weight"] = (2 * taps * groups, hidden)
    if config.selector is not None:
        rank = config.selector.rank
        shapes["candidate_selector.predecessor_codebook"] = (vocab, rank)
        shapes["candidate_selector.successor_codebook"] = (vocab, rank)
        shapes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
    if config.domino is not None:
        gru, emb = config.domino.gru_hidden_dim, config.domino.emb_dim
        shapes["prefix_gru.weight_ih_l0"] = (3 * gru, hidden)
        shapes["prefix_gru.weight_hh_l0"] = (3 * gru, gru)
        shapes["embed_proj.0.weight"] = (emb, hidden + gru)
        shapes["embed_proj.2.weight"] = (vocab, emb)
    if config.dspark is not None:
        shapes |= _dspark_tensors(config)
    return shapes


def _dspark_tensors(config: DrafterConfig) -> dict[str, Shape]:
    spark, hidden, shapes = config.dspark, config.hidden_size, {}
    assert spark is not None
    rank = spark.markov_rank
    if rank:
        shapes["markov_head.markov_w1.weight"] = (config.vocab_size, rank)
        shapes["markov_head.markov_w2.weight"] = (config.draft_vocab_size or config.vocab_size, rank)
        sizes = {"gated": ("gate_proj", rank, hidden + rank), "rnn": ("joint_proj", 3 * rank, 2 * rank + hidden)}
        if spark.markov_head_type in sizes:
            name, out, size = sizes[spark.markov_head_type]
            shapes[f"markov_head.{name}.weight"] = (out, size)
            shapes[f"markov_head.{name}.bias"] = (out,)
    if spark.confidence:
        shapes["confidence_head.proj.weight"] = (1, hidden + (rank if spark.confidence_with_markov else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    return shapes


def kind_of(names: set[str]) -> str:
    """The method that tensor names speak of; plain names are a DFlash drafter."""
    for prefix, kind in KIND_MARKS.items():
        if any(name.startswith(prefix) for name in names):
            return kind
    return "dflash2" if any(".attention_conv." in name for name in names) else "dflash"
