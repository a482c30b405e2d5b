"""The torch runtime behind the entry point `dspine.runtimes`: importable without torch, which it looks for when asked."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from dspine.common.bench.contenders import Contender
from dspine.common.errors import BackendError
from dspine.common.memory import DeviceMemory
from dspine.common.parity.backends import ParityBackend
from dspine.common.protocols import Availability, Drafter, Rounds, ServingSupport, Target, Timer

INSTALL = 'pip install "dspine[cuda]"'


class TorchRuntime:
    """`protocols.Runtime` for CUDA and the CPU."""

    name = "torch"

    def availability(self) -> Availability:
        """Whether torch is there and which devices it drives; a torch that is installed but broken says so."""
        if importlib.util.find_spec("torch") is None:
            return Availability(False, "torch is not installed", install=INSTALL)
        try:
            import torch
        except (ImportError, OSError) as error:  # a broken install: missing libraries
            return Availability(False, f"torch is installed but does not import ({error})", install=INSTALL)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = (*(f"cuda:{index}" for index in range(count)), "cpu")
        found = f"CUDA: {torch.cuda.get_device_name(0)}" if count else "no CUDA device, runs on the CPU"
        return Availability(True, f"torch {torch.__version__}, {found}", devices, INSTALL)

    def load_target(self, folder: Path, *, device: str = "auto", dtype: str = "auto") -> Target:
        """A Hugging Face folder as a target. device: auto, cpu, cuda, cuda:N; dtype: auto, bfloat16, float32, float16."""
        self._require()
        from dspine_cuda import ops
        from dspine_cuda.targets.load import load_target

        ops.register()
        return load_target(Path(folder), device=device, dtype=dtype)

    def load_random_target(self, folder: Path, *, device: str = "auto", dtype: str = "auto") -> Target:
        """A target of a folder that has a config.json only, its weights drawn on the device: for `dspine bench`."""
        self._require()
        from dspine_cuda import ops
        from dspine_cuda.targets.load import load_target

        ops.register()
        return load_target(Path(folder), device=device, dtype=dtype, random_weights=True)

    def load_drafter(self, folder: Path, target: Target) -> Drafter:
        """A drafter folder, bound to `target`."""
        self._require()
        from dspine_cuda.drafter import load_drafter

        return load_drafter(Path(folder), target)

    def serving(self, target: Target, drafter: Drafter | None) -> ServingSupport:
        """Batched rounds and kept prefixes, for lean dense targets."""
        from dspine_cuda.serving import support

        return support(target, drafter)

    def graph_rounds(self, target: Target, drafter: Drafter | None, mode: str) -> tuple[Rounds | None, str]:
        """Rounds as CUDA graphs, or None and the reason. mode: auto, on, off."""
        from dspine_cuda.static.loop import graph_rounds

        return graph_rounds(target, drafter, mode)

    def bench_contenders(self, target: Target, drafter: Drafter | None) -> list[Contender]:
        """Graphs beside the loop, for `dspine bench`; none where the pair cannot have them."""
        from dspine_cuda.bench import contenders

        return list(contenders(target, drafter))

    def bench_refusal(self, target: Target, drafter: Drafter | None) -> str | None:
        """Why `bench_contenders` adds nothing; None where it adds something."""
        from dspine_cuda.bench import refusal

        return refusal(target, drafter)

    def accelerator(self, device: str) -> str:
        """Product name of a CUDA device; empty for the CPU."""
        if not device.startswith("cuda"):
            return ""
        import torch

        return torch.cuda.get_device_name(device)

    def device_memory(self, device: str) -> DeviceMemory | None:
        """Free and total memory of a CUDA device; None for the CPU."""
        if not device.startswith("cuda"):
            return None
        import torch

        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free, "free device memory")

    def timer(self, device: str) -> Timer:
        """CUDA events; the host's clock on the CPU."""
        self._require()
        from dspine_cuda.timer import make_timer

        return make_timer(device)

    def parity_backends(self) -> list[ParityBackend]:
        """`torch-ops` and `triton`, each skipped with a reason where it cannot run."""
        found = self.availability()
        if not found.ok:
            return [ParityBackend(name, "none", skipped=found.reason) for name in ("torch-ops", "triton")]
        from dspine_cuda import parity

        return parity.backends()

    def _require(self) -> None:
        found = self.availability()
        if not found.ok:
            raise BackendError(f"the torch runtime cannot run here: {found.reason}; install it with {found.install}")


RUNTIME = TorchRuntime()
