"""Every drafter that the experiments train: a name, what differs from the base config, and how its drafts are read."""

from __future__ import annotations

from dataclasses import dataclass, field

BASE_BLOCK, BASE_ANCHORS, BASE_GAMMA = 8, 128, 4.0


@dataclass(frozen=True)
class Score:
    """One way to draft with a trained drafter. independent: each position alone; top_k: other than trained with; draft_heat:
    the drafter's temperature over the target's (scored at temperatures above 0 only)."""

    name: str = "walk"
    independent: bool = False
    top_k: int | None = None
    draft_heat: float | None = None

    @property
    def swept(self) -> bool:
        """Not how the drafter was trained to draft."""
        return self.top_k is not None or self.draft_heat is not None


WALK, ALONE = Score(), Score("independent", independent=True)


@dataclass(frozen=True)
class Variant:
    """`overrides` are the trainer's `section.key=value`; the first score is the variant's own figure."""

    name: str
    overrides: tuple[str, ...] = ()
    scores: tuple[Score, ...] = (WALK,)
    note: str = ""
    base: dict[str, str] = field(default_factory=dict)

    def wanted(self, few: bool) -> tuple[Score, ...]:
        """The scores to make; few: without the swept ones."""
        return tuple(score for score in self.scores if not (few and score.swept))


def _blocks(block: int) -> Variant:
    """Equal block rows a step: fewer anchors for longer blocks; the position decay stretches with the block."""
    anchors = max(1, round(BASE_ANCHORS * BASE_BLOCK / block))
    overrides = (
        f"model.block_size={block}",
        f"data.num_anchors={anchors}",
        f"loss.gamma={BASE_GAMMA * block / BASE_BLOCK}",
    )
    return Variant(f"block_{block}", overrides, note=f"blocks of {block} rows, {anchors} anchors")


def _layers(*layers: int) -> str:
    return f"model.injection_layers=[{','.join(str(layer) for layer in layers)}]"


_HEATS = tuple(Score(f"heat_{heat:g}", draft_heat=heat) for heat in (0.6, 0.8, 0.9, 1.1, 1.25))
_SWEPT = tuple(Score(f"top_{k}", top_k=k) for k in (2, 4, 8, 12, 24, 32))


def _plain(method: str) -> tuple[str, ...]:
    return (f"model.method={method}", "loss.alignment=none")


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("full", scores=(WALK, ALONE, *_SWEPT, *_HEATS), note="DSpine as published"),
        Variant("dflash", _plain("dflash"), note="DFlash: bidirectional blocks"),
        Variant("dflash_causal", (*_plain("dflash"), "model.is_causal=true"), note="DFlash with block-causal attention"),
        Variant("domino", _plain("domino"), note="Domino: a GRU corrects the logits"),
        Variant("dspark", _plain("dspark"), note="DSpark: a Markov head corrects the logits"),
        Variant("dflash2", _plain("dflash2"), note="DFlash2: convolutions and a candidate selector"),
        Variant("no_refinement", ("loss.refinement=false",), (ALONE,), "injection, independent drafts"),
        Variant("no_injection", (_layers(), "loss.refinement=false"), (ALONE,), "layer supervision only, independent drafts"),
        Variant("align_none", ("loss.alignment=none",), (WALK, ALONE), "DSpine without layer supervision"),
        Variant("align_token", ("loss.alignment=token",), (WALK, ALONE), "DSpine, each layer predicts tokens"),
        Variant("backbone_token", ("model.injection=false", "loss.alignment=token"), note="backbone, tokens at each layer"),
        Variant("from_2", (_layers(1, 2, 3, 4),), note="messages from layer 2 on"),
        Variant("from_3", (_layers(2, 3, 4),), note="messages from layer 3 on"),
        Variant("from_4", (_layers(3, 4),), note="messages from layer 4 on"),
        Variant("from_5", (_layers(4),), note="messages in layer 5 only"),
        Variant("pair_1_5", (_layers(0, 4),), note="messages in layers 1 and 5"),
        Variant("pair_2_5", (_layers(1, 4),), note="messages in layers 2 and 5"),
        Variant("pair_3_5", (_layers(2, 4),), note="messages in layers 3 and 5"),
        Variant("rank_64", ("model.transfer_rank=64", "model.message_size=64"), note="r = 64, a = 64"),
        Variant("rank_128", ("model.transfer_rank=128",), note="r = 128"),
        Variant("rank_576", ("model.transfer_rank=576",), note="r = 576, the whole hidden size"),
        Variant("two_hop", ("model.hops=2",), note="messages from two tokens back as well"),
        Variant("refine_two", ("model.refined_layers=2",), note="the last two layers are refined"),
        Variant("two_hop_refine_two", ("model.hops=2", "model.refined_layers=2"), note="both"),
        *(_blocks(block) for block in (4, 12, 16, 24, 32)),
    )
}
