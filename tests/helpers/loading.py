"""Peak memory of loading a drafter of an 8B drafter's shape at a quarter of its width, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.layouts import QWEN3_TAPS, backbone, card, dflash_part, write_layout

HIDDEN, INNER, LAYERS, VOCAB = 1024, 3072, 5, 512
RUN = """
import json, sys
from pathlib import Path
from types import SimpleNamespace
from {module} import load_drafter
from dspine.common.protocols import TargetInfo
{imports}

def resident(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key))

def target(hidden):
    info = TargetInfo("stub", "toy", 36, hidden, {vocab}, 512, frozenset(), "bfloat16", "cpu", "toy")
    return SimpleNamespace(info=info, embed=None, head=lambda x: {zeros}, bind_features=lambda ids: None)

small, large = map(Path, sys.argv[1:])
load_drafter(small, target(64))  # everything lazy is there
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = resident("VmRSS")
drafter = load_drafter(large, target({hidden}))
print(json.dumps([resident("VmHWM") - before, resident("VmRSS") - before]))
"""


SLACK = 6 << 20
CAN_MEASURE = Path("/proc/self/clear_refs").exists()


def drafter_bytes() -> tuple[int, int]:
    """(bytes of all tensors in bfloat16, bytes of the largest)."""
    sizes = []
    for shape in backbone(HIDDEN, INNER, LAYERS, 5, 8, 2).values():
        size = 2
        for dimension in shape:
            size *= dimension
        sizes.append(size)
    return sum(sizes), max(sizes)


def loading_peak(tmp_path: Path, module: str, imports: str, zeros: str) -> tuple[int, int]:
    """(peak, rest) in bytes above what the process held before `module`.load_drafter read the large drafter."""
    folders = []
    for name, hidden, inner in (("small", 64, 128), ("large", HIDDEN, INNER)):
        data = card(hidden, inner, LAYERS, VOCAB, 36, 1e6, 2, block_size=16, dflash_config=dflash_part(VOCAB - 1, QWEN3_TAPS))
        folders.append(
            write_layout(tmp_path / name, data | {"num_attention_heads": 8}, backbone(hidden, inner, LAYERS, 5, 8, 2))
        )
    code = RUN.format(module=module, imports=imports, zeros=zeros, vocab=VOCAB, hidden=HIDDEN)
    place = dict(os.environ) | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}  # freed tensors go back to the system, as large ones do
    command = [sys.executable, "-c", code, *map(str, folders)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=place)
    assert found.returncode == 0, found.stderr
    peak, rest = json.loads(found.stdout.splitlines()[-1])
    return peak, rest
