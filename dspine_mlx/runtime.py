"""The MLX runtime as the entry point `dspine.runtimes: mlx` names it. Importing this module imports no MLX."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspine.common.errors import BackendError
from dspine.common.memory import CacheOptions, DeviceMemory
from dspine.common.parity.backends import ParityBackend
from dspine.common.protocols import Availability, ServingSupport, Timer

_INSTALL = "pip install 'dspine[mlx]'"


class MlxRuntime:
    """MLX on Metal, on the CPU, or on its CUDA back end. Everything of MLX is imported when it is first used."""

    name = "mlx"
    keeps_caches = ("max_kv_size", "kv_bits")  # options of `CacheOptions` that `load_target` takes

    def availability(self) -> Availability:
        """Whether MLX and mlx-lm are installed, and the devices that MLX offers here."""
        missing = [name for name in ("mlx", "mlx_lm") if importlib.util.find_spec(name) is None]
        if missing:
            return Availability(False, f"not installed: {', '.join(missing)}", install=_INSTALL)
        try:
            import mlx.core as mx
        except ImportError as error:  # a wheel without its backend library, or one built for another machine
            return Availability(False, f"MLX does not load: {error}", install=_INSTALL)
        fast = "metal" if mx.metal.is_available() else "cuda" if mx.is_available(mx.gpu) else None
        if fast is None:
            return Availability(True, "MLX on the CPU: correct but slow, meant for parity tests", ("cpu",), _INSTALL)
        return Availability(True, f"MLX on {fast}", (fast, "cpu"), _INSTALL)

    def load_target(self, folder: Path, *, device: str = "auto", dtype: str = "auto", cache: CacheOptions | None = None) -> Any:
        """A target of the folder, `protocols.Target`. `device`: auto, metal, cuda or cpu; `dtype`: auto, bfloat16, float32;
        `cache`: how its K/V are kept. On Metal the wired limit becomes the recommended working set, as mlx_lm sets it."""
        self._use_device(device)
        from dspine_mlx.arrays import wire_memory
        from dspine_mlx.targets import load_target

        wire_memory()
        return load_target(Path(folder), dtype=dtype, cache=cache)

    def load_drafter(self, folder: Path, target: Any) -> Any:
        """The drafter of the folder bound to a target of this runtime, `protocols.Drafter`."""
        self._require()
        from dspine_mlx.drafter import load_drafter

        return load_drafter(Path(folder), target)

    def serving(self, target: Any, drafter: Any) -> ServingSupport:
        """Kept prefixes for the server, where caches can be cut anywhere."""
        from dspine_mlx.prefixes import support

        return support(target, drafter)

    def session_ops(self, target: Any, drafter: Any) -> Any:
        """`protocols.PrefixOps` with moves, for conversations: any target."""
        from dspine_mlx.prefixes import MlxPrefixes

        return MlxPrefixes()

    def save_prompt_cache(self, path: Path, target: Any, drafter: Any, session: Any, about: dict[str, Any]) -> int:
        """`dspine cache-prompt`: the caches of a session as a file; returns its bytes."""
        from dspine_mlx.prompt_cache import save_prompt_cache

        return save_prompt_cache(path, target, drafter, session, about)

    def load_prompt_cache(self, path: Path, target: Any, drafter: Any) -> tuple[Any, Any, Any, dict[str, Any]]:
        """`--prompt-cache-file`: (tokens, target cache, drafter cache or None, about)."""
        from dspine_mlx.prompt_cache import load_prompt_cache

        return load_prompt_cache(path, target, drafter)

    def accelerator(self, device: str) -> str:
        """Product name of the GPU that MLX drives (`Apple M5 Max`); empty for the CPU."""
        if device == "cpu":
            return ""
        import mlx.core as mx

        return str(mx.device_info(mx.gpu).get("device_name", device))

    def device_memory(self, device: str) -> DeviceMemory | None:
        """What Metal recommends as the largest working set, or a CUDA device's memory; None for the CPU."""
        if device == "cpu":
            return None
        import mlx.core as mx

        facts = mx.device_info(mx.gpu)
        total = int(facts.get("memory_size") or facts.get("total_memory") or 0)
        working = int(facts.get("max_recommended_working_set_size") or facts.get("free_memory") or total)
        return DeviceMemory(total, working, "recommended working set" if device == "metal" else "free device memory")

    def peak_memory(self) -> int:
        """Bytes that MLX's allocator held at most; on a Mac the size of the process leaves out what Metal holds."""
        self._require()
        import mlx.core as mx

        return mx.get_peak_memory()

    def runs_wide(self, card: dict[str, Any], device: str) -> bool:
        """For memory plans: whether a model with this config.json runs in float32 unless told otherwise, as `load_target` says:
        on the CPU, quantised ones and those with experts."""
        facts = {**card, **(card.get("text_config") or {})}
        names = ("quantization", "quantization_config", "num_experts", "num_local_experts", "n_routed_experts")
        return device == "cpu" and any(facts.get(name) for name in names)

    def packs_drafters(self, device: str) -> bool:
        """For memory plans: whether `load_drafter` leaves quantised matrices packed."""
        return device != "cpu"

    def timer(self, device: str) -> Timer:
        """The host's clock, after MLX has computed what a mark is given."""
        self._require()
        from dspine_mlx.timer import make_timer

        return make_timer(device)

    def tune(self, folder: Path, announce: Callable[[str], None]) -> Path | None:
        """`dspine bench --tune`: time the small-row kernels against MLX's own on this model's shapes; the table's file, or
        None where the model has nothing they know. BackendError without Metal."""
        self._require()
        from dspine_mlx.tune import tune_folder

        return tune_folder(folder, announce)

    def kernel_notes(self) -> dict[str, str]:
        """For `dspine doctor`: whether this machine's products with packed weights were measured. DSpineError where the table
        is damaged."""
        if not self.availability().ok:
            return {}
        import mlx.core as mx

        from dspine_mlx.small_rows import load_table

        if not mx.metal.is_available():
            return {"small-row products": "no Metal here: MLX's own products run"}
        table, why = load_table(str(mx.device_info()["device_name"]))
        return {"small-row products": f"chosen by {why}" if table is not None else why}

    def parity_backends(self) -> list[ParityBackend]:
        """`mlx-ops` and `metal`, each skipped with a reason where it cannot run."""
        found = self.availability()
        if not found.ok:
            return [ParityBackend(name, "none", skipped=found.reason) for name in ("mlx-ops", "metal")]
        from dspine_mlx import parity

        return parity.backends()

    def _require(self) -> Availability:
        found = self.availability()
        if not found.ok:
            raise BackendError(f"the MLX runtime cannot run here ({found.reason}); install it with: {found.install}")
        return found

    def _use_device(self, device: str) -> None:
        """Make `device` MLX's default. Only an explicit choice changes it; `auto` leaves MLX's own."""
        found = self._require()
        if device == "auto":
            return
        if device not in found.devices:
            raise BackendError(f"device {device!r} is not there for MLX; here: {', '.join(found.devices)}; or --device auto")
        import mlx.core as mx

        mx.set_default_device(mx.Device(mx.cpu if device == "cpu" else mx.gpu))


RUNTIME = MlxRuntime()
