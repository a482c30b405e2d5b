"""A fresh process that decodes plainly: nothing else has imported the core's modules before the kernels are registered."""

from __future__ import annotations

import subprocess
import sys


def test_kernels_register_in_a_fresh_process():
    code = (
        "from dspine_cuda.ops import register; from dspine.common.registry import kernel_report; "
        "register(); print(len(kernel_report()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 4
