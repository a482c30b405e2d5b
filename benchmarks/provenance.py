"""Where a figure comes from: the facts that `dspine bench` puts into its reports, for the scripts here."""

from dspine.common.bench.provenance import PACKAGES, provenance

__all__ = ["PACKAGES", "provenance"]
