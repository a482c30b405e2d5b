"""What a parity check is: inputs, a run on a backend, the float64 answer, and bounds per kind of output.

Bounds are relative Frobenius errors against float64 on the very numbers the backend gets (rounded to its dtype first).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dspine.common.parity.backends import to_bfloat16

Array = Any
Call = Callable[..., Any]  # call("gdn_verify", *args): the operation on the backend under test

FLOAT32, BFLOAT16 = "float32", "bfloat16"
TINY = 1e-6
BOTH, SINGLE = (FLOAT32, BFLOAT16), (FLOAT32,)

# (kind of output, dtype) -> bound. A bfloat16 output carries its own rounding of 1.7e-3; state and factors are float32; steps
# are up to four bfloat16 roundings one after another.
BOUNDS = {
    ("steps", FLOAT32): 2e-6,
    ("steps", BFLOAT16): 5e-3,
    ("out", FLOAT32): 2e-6,
    ("out", BFLOAT16): 2e-3,
    ("state", FLOAT32): 2e-6,
    ("state", BFLOAT16): 1e-5,
}
HOSTILE = {
    ("steps", FLOAT32): 1e-5,
    ("steps", BFLOAT16): 5e-3,
    ("out", FLOAT32): 1e-5,
    ("out", BFLOAT16): 3e-3,
    ("state", FLOAT32): 1e-5,
    ("state", BFLOAT16): 1e-5,
}


@dataclass(frozen=True)
class Check:
    """One row of the table.

    build() -> tuple of arguments with `Value`s in it; run(call, args) -> named outputs on the backend; expect(args in
    float64 NumPy) -> the same names in NumPy. kinds: output name -> `out` (in the dtype under test), `scores` (float32
    from inputs of that dtype), `state` (float32 throughout), `steps` (rounded to the dtype under test between steps),
    or `exact` (must agree in every entry: indices and copies).
    hostile: the wider bounds.
    """

    op: str
    shape: str
    family: str
    build: Callable[[], tuple[Any, ...]]
    run: Callable[[Call, tuple[Any, ...]], dict[str, Array]]
    expect: Callable[[tuple[Any, ...]], dict[str, np.ndarray]]
    kinds: dict[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = BOTH
    hostile: bool = False

    def bound(self, output: str, dtype: str, want: np.ndarray) -> float:
        """Largest allowed error of this output. In a handful of numbers the rounding of `want` itself may already exceed
        2e-3 (half a unit of bfloat16 is 3.9e-3): then it is that rounding, and a tenth of it more."""
        kind = self.kinds[output]
        if kind == "exact":
            return 0.0
        bound = (HOSTILE if self.hostile else BOUNDS)[kind if kind in ("state", "steps") else "out", dtype]
        if (kind, dtype) == ("out", BFLOAT16):
            bound = max(bound, 1.1 * _relative(to_bfloat16(want.astype(np.float32)), want))
        return bound

    def error(self, output: str, got: np.ndarray, want: np.ndarray) -> float:
        """Relative Frobenius error, or the share of entries that differ where the output must be exact; inf on NaN or shape."""
        if got.shape != want.shape:
            return float("inf")
        if self.kinds[output] == "exact":
            same = (got == want) | (np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64)))
            return float(1.0 - same.mean()) if same.size else 0.0
        # a padded slot may hold NaN, and must still hold it afterwards
        live = ~np.isnan(want)
        if not np.isfinite(got[live]).all() or not np.isnan(got[~live]).all():
            return float("inf")
        return _relative(got[live], want[live])


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    """|got - want| / |want|; below a root mean square of TINY (an entropy of 1e-20) the error counts against TINY."""
    if not want.size:
        return 0.0
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), TINY * want.size**0.5))


def generator(*key: Any) -> np.random.Generator:
    """The same numbers for the same key, on every machine."""
    digest = 0
    for part in "/".join(map(str, key)).encode():
        digest = (digest * 131 + part) % (2**63)
    return np.random.default_rng(digest)
