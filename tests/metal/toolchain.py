"""Compiles the runtime and kernels with g++ and keeps them in a cache folder, by the hash of all that goes in."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHIM = Path(__file__).parent / "shim"
COMPILE_SECONDS = 180

_FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fsingle-precision-constant",  # 1.0 is a float in Metal
    "-ffp-contract=off",
    "-fexcess-precision=16",  # every half operation rounds
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-finite-loops",  # an endless loop must stay one, for the watchdog to find
    "-fsigned-char",
    "-ftrivial-auto-var-init=pattern",  # locals that were never set are huge, not zero
    "-w",
]


class CompileError(RuntimeError):
    """g++ rejects the kernel; the message holds its diagnostics with the line numbers of the text MLX generates."""


def unavailable() -> str | None:
    """Why the emulator cannot run here, or None."""
    if sys.platform != "linux":
        return f"the Metal emulator runs on Linux, this is {sys.platform} (a Mac runs the kernels themselves)"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"the emulator's context switch is written for x86-64 and aarch64, this is {platform.machine()}"
    if shutil.which("g++") is None:
        return "the Metal emulator needs g++ 12 or newer; none is installed"
    if _gcc_version() < 12:
        return f"the Metal emulator needs g++ 12 or newer, found {_gcc_version()}"
    if mlx_include() is None:
        return "the Metal emulator needs the headers in MLX's wheel; MLX is not installed"
    return None


@functools.cache
def _gcc_version() -> int:
    text = subprocess.run(["g++", "-dumpversion"], capture_output=True, text=True, check=True, timeout=60).stdout
    return int(text.split(".")[0])


@functools.cache
def mlx_include() -> Path | None:
    """The include folder of the installed MLX, whose utils.h every kernel of `mx.fast.metal_kernel` sees."""
    spec = importlib.util.find_spec("mlx")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(root) / "include"
        if (folder / "mlx" / "backend" / "metal" / "kernels" / "utils.h").is_file():
            return folder
    return None


@functools.cache
def cache_folder() -> Path:
    """A folder of this user below the system's temporary one."""
    folder = Path(tempfile.gettempdir()) / f"dspine-metal-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user; remove it or set TMPDIR")
    return folder


@functools.cache
def _machine_flags() -> tuple[str, ...]:
    """Half conversions and fused multiply-add in hardware where the CPU has them (contraction stays off)."""
    if platform.machine() != "x86_64":
        return ()
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("flags")[2].partition("\n")[0].split()
    return tuple(f"-m{name}" for name in ("fma", "f16c") if {name, "avx"} <= set(flags))


@functools.cache
def _shim_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in SHIM.rglob("*") if p.is_file() and not p.name.startswith("lint")):
        digest.update(path.relative_to(SHIM).as_posix().encode() + path.read_bytes())
    digest.update((mlx_include() / "mlx/backend/metal/kernels/utils.h").read_bytes())
    digest.update(repr((_FLAGS, _machine_flags(), _gcc_version(), platform.machine())).encode())
    return digest.hexdigest()


def _build(command: list[str], target: Path, code: str | None = None) -> None:
    """Run a compiler (`code`: its standard input) into a private file and rename it: several processes may build it."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix="build-", suffix=target.suffix, delete=False) as file:
        temporary = Path(file.name)
    try:
        done = subprocess.run(
            [*command, "-o", str(temporary)], input=code, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False
        )
        if done.returncode:
            raise CompileError(done.stderr[-6000:])
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)


def _prune(folder: Path) -> None:
    """Drop what was built more than a week ago; it is built again when it is needed."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - 7 * 86400:
                path.unlink()


@functools.cache
def runtime_library() -> Path:
    """The shared library with fibers, rendezvous and the check mode."""
    target = cache_folder() / f"runtime-{_shim_hash()[:24]}.so"
    if not target.exists():
        _prune(cache_folder())
        sources = [str(SHIM / "runtime.cpp"), str(SHIM / "check.cpp")]
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing"]
        _build(["g++", *flags, *sources], target)
    return target


def compile_kernel(code: str, check: bool) -> Path:
    """Compile a translation unit into a shared library that is linked to the runtime; cached by content."""
    key = hashlib.sha256(f"{_shim_hash()}\n{check}\n{code}".encode()).hexdigest()[:32]
    target = cache_folder() / f"kernel-{key}.so"
    if target.exists():
        return target
    runtime = str(runtime_library())
    mode = ["-O1", "-fsanitize=thread"] if check else ["-O2"]
    command = ["g++", *_FLAGS, *_machine_flags(), *mode, "-I", str(SHIM), "-I", str(mlx_include()), "-x", "c++", "-"]
    if not check:
        _build([*command, "-shared", "-x", "none", runtime, "-lm"], target, code)
        return target
    # The callbacks of -fsanitize=thread are ours: compile with it, link without it.
    compiled = cache_folder() / f"kernel-{key}.o"
    _build([*command, "-c"], compiled, code)
    _build(["g++", "-shared", str(compiled), runtime, "-lm"], target)
    return target
