"""Kernel benchmark: parity first, then times against floors, then other people's kernels.

    python -m benchmarks.kernels.run --json kernels.json
    python -m benchmarks.kernels.run --sweep --lengths 2,8,16      launch parameters of the GDN kernels
    python -m benchmarks.kernels.run --vendors FOLDER              with SGLang's and fla-core's wheels unpacked there

An operation whose parity check fails is not timed. Times are CUDA graph replays in microseconds: median (tenth to
ninetieth percentile). `bytes` is the traffic over measured bandwidth, `launches` an empty graph of as many launches;
`x` is the time over their sum. The last line, and the file of --json, hold everything with machine, versions and commit.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks.provenance import provenance

# shapes of the parity table that stand for what is timed here
SHAPES = {
    "gdn_inputs": "qwen3.6-35b w=16",
    "select_length": "B=1 M=15",
    "correct_length": "B=1 M=15",
    "accept_greedy": "B=1 w=16",
    "accept_point_mass": "B=1 w=16",
}


def parity_gate() -> Callable[[str], str | None]:
    """operation -> why it must not be timed (None: its parity checks at the timed shape pass)."""
    from dspine.common.parity.runner import run_check, table
    from dspine_cuda.parity import backends

    backend = next(found for found in backends() if found.name == "triton")
    known: dict[str, str | None] = {}

    def gate(op: str) -> str | None:
        if op not in known:
            wanted = SHAPES.get(op, "qwen3-8b")
            checks = [c for c in table(False) if c.op == op and c.shape.startswith(wanted)]
            known[op] = None if checks else f"no parity check of shape {wanted}"
            for check in checks:
                for dtype in check.dtypes[-1:]:  # bfloat16 where there is one
                    result = run_check(check, dtype, backend)
                    if not result.passed or result.skipped_reason:
                        known[op] = (
                            f"{check.family} {dtype}: error {result.error}, bound {result.bound}, {result.skipped_reason}"
                        )
        return known[op]

    return gate


def show(row: dict[str, Any]) -> None:
    """One line of the table."""
    name = f"w={row['w']:<3}{row['way']}" if "way" in row else row["op"]
    if "us" not in row:
        print(f"{name:<42}{row.get('refused') or row.get('failed')}", flush=True)
        return
    traffic, empty = row["floor_bytes"], row["floor_launches"]
    line = f"{name:<42}{row['us']:8.1f} ({row['low']:.1f}-{row['high']:.1f})".ljust(68)
    line += f"bytes {traffic:6.1f}  launches {empty:5.1f}  x{row['us'] / (traffic + empty):5.2f}"
    line += f"  x{row['us'] / traffic:5.2f} of bytes" if row["op"] == "gdn" else ""
    line += f"  target {row['target']:.0f}" if "target" in row else ""
    print(line, flush=True)


def guarded(name: str, rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows as they come; a failure ends this part only, with its trace on stderr."""
    found: list[dict[str, Any]] = []
    try:
        for row in rows:
            show(row) if row["op"] != "sweep" else None
            found.append(row)
    except (RuntimeError, ValueError, TypeError, AssertionError, AttributeError, TritonError) as error:
        traceback.print_exc()
        found.append({"op": name, "failed": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})
        show(found[-1])
    return found


def show_sweep(rows: list[dict[str, Any]]) -> None:
    """The three best of each length and way."""
    for count in sorted({row["w"] for row in rows if "w" in row}):
        for way in ("verify", "overlapped", "deferred", "commit"):
            mine = sorted((row for row in rows if row.get("w") == count and way in row), key=lambda row: row[way])
            keys = ("commit_v", "num_warps") if way == "commit" else ("block_v", "num_warps", "block")
            best = "; ".join(f"{row[way]:.1f} {tuple(row[key] for key in keys)}" for row in mine[:3])
            print(f"w={count:<3}{way:<12}{best}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", help="tokens of a verify, by commas")
    parser.add_argument("--sweep", action="store_true", help="try launch parameters instead of timing")
    parser.add_argument("--vendors", type=Path, help="folder with SGLang's and fla-core's wheels unpacked")
    parser.add_argument("--no-reference", action="store_true", help="leave the core's own code out")
    parser.add_argument("--only", choices=("gdn", "draft"), help="one half")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: the kernel benchmark needs a CUDA device", file=sys.stderr)
        sys.exit(2)
    from benchmarks.kernels import draft, gdn, vendors
    from benchmarks.kernels.timing import measure_floors
    from dspine_cuda import ops

    ops.register()
    counts = tuple(int(part) for part in (options.lengths or ("2,8,16" if options.sweep else "1,2,4,8,16")).split(","))
    results: list[dict[str, Any]] = []
    floors = measure_floors()
    print(f"read {floors.read / 1e12:.2f} TB/s, copy {floors.copy / 1e12:.2f} TB/s, launches {floors.launches}", flush=True)
    if options.sweep:
        results += guarded("sweep", gdn.sweep(counts))
        show_sweep(results)
    else:
        found, notes = vendors.find(options.vendors)
        print(*notes, sep="\n", flush=True)
        plain = not options.no_reference
        if options.only != "draft":
            results += guarded("gdn", gdn.rows(counts, floors, found, reference=plain))
        if options.only != "gdn":
            results += guarded("draft", draft.rows(floors, parity_gate(), reference=plain))
    report = provenance() | {
        "device": torch.cuda.get_device_name(), "read": floors.read, "copy": floors.copy, "launches": floors.launches,
        "results": results,
    }  # fmt: skip
    text = json.dumps(report)
    if options.json:
        options.json.write_text(text + "\n")
    print(text[:400] + (" ... (whole in --json)" if options.json else text[400:]))


if __name__ == "__main__":
    main()
