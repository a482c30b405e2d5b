"""Address spaces by clang: g++ runs kernels without them, and so cannot see a thread pointer made from a device pointer."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
from collections.abc import Sequence

from tests.metal.rewrite import rewrite_threadgroup
from tests.metal.signature import KernelText
from tests.metal.toolchain import COMPILE_SECONDS, SHIM

_FLAGS = [
    "--target=aarch64-linux-gnu",  # _Float16 in every clang; nothing is linked or run
    "-ffreestanding",
    "-std=c++17",
    "-fsyntax-only",
    "-fno-exceptions",
    "-fno-rtti",
    "-w",
    "-Wno-reserved-user-defined-literal",
    "-ferror-limit=200",
]

# clang names a type's space by the macro that made it
_SPACE = re.compile(r"address.space|'[^'\n]*\b(?:device|constant|threadgroup)\b[^'\n]*'")


class LintError(RuntimeError):
    """clang cannot parse the kernel."""


def lint_unavailable() -> str | None:
    """Why address spaces cannot be checked here, or None."""
    return None if shutil.which("clang++") else "the address-space lint needs clang++; none is installed"


def address_space_errors(kernel: KernelText, body: str) -> list[str]:
    """What clang says about address spaces in the text of a kernel. Raises LintError when it cannot parse the text."""
    return list(_errors(lint_unit(kernel, body)))


def lint_unit(kernel: KernelText, body: str) -> str:
    """The file that clang checks: the text with `threadgroup` variables declared extern, and an instantiation."""
    rewritten, _ = rewrite_threadgroup(body, form="extern")
    head = kernel.text.removesuffix(") {\n" + body + "\n}\n")
    call = f"{kernel.function}{kernel.template_arguments}"
    use = f"auto emu_use = &{call};\n" if kernel.template_arguments else ""
    return f'#include "lint_prelude.h"\n#line 1 "kernel"\n{head}) {{\n{rewritten}\n}}\n{use}'


@functools.lru_cache(maxsize=512)
def _errors(code: str) -> tuple[str, ...]:
    command = ["clang++", *_FLAGS, "-I", str(SHIM), "-x", "c++", "-"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
    spaces, others = _sort(done.stderr)
    if others and not spaces:
        raise LintError("clang cannot read the kernel, so its address spaces are unchecked:\n" + "\n".join(others[:5]))
    return tuple(spaces)


def _sort(diagnostics: str) -> tuple[Sequence[str], Sequence[str]]:
    """(errors about address spaces, other errors), each with its notes.

    Structures copied from or to device memory are left out: Metal makes copy constructors for every address space.
    """
    spaces, others = [], []
    for block in re.split(r"(?m)^(?=[^\s:]+:\d+:\d+: (?:fatal )?error: )", diagnostics):
        if not re.match(r"[^\s:]+:\d+:\d+: (?:fatal )?error: ", block):
            continue
        if (
            "(the implicit copy" in block
            or "(the implicit move" in block
            or "changes address space" in block
            and "binding" in block
        ):
            continue
        (spaces if _SPACE.search(block) else others).append(block.strip())
    return spaces, others
