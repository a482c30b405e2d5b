"""`dspine convert`: a drafter quantised, or in another published form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dspine.common.convert import FORMS, Scheme, convert_drafter
from dspine.common.models import AUTO_DRAFT, resolve_draft, resolve_model


def convert(
    source: Annotated[str, typer.Argument(help="The drafter: a folder, or a hub id.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    form: Annotated[str, typer.Option(help=f"{', '.join(FORMS)}; mlx where --bits is given.", show_default=False)] = "",
    bits: Annotated[int | None, typer.Option(help="4 or 8: quantise the matrices (MLX's affine form).")] = None,
    group_size: Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")] = 64,
    mixed: Annotated[bool, typer.Option("--mixed", help="The MLPs take --bits, the other matrices 8.")] = False,
    target: Annotated[str | None, typer.Option(help="The target model, where codes must be made from its LM head.")] = None,
) -> None:
    """Quantise a drafter, or convert it between the SpecForge, two-file and MLX forms."""
    folder = resolve_draft(source, source) if source != AUTO_DRAFT else None
    if folder is None:
        raise typer.BadParameter("name a drafter folder or a hub id")
    chosen = form or ("specforge" if bits is None else "mlx")
    scheme = Scheme(8 if bits is None else bits, group_size, mixed) if bits is not None or chosen == "mlx" else None
    report = convert_drafter(folder, out, form=chosen, scheme=scheme, target=None if target is None else resolve_model(target))
    for line in report.lines():
        typer.echo(line)
    typer.echo(f"written to {out}")
