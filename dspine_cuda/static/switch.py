"""A parent CUDA graph whose conditional SWITCH nodes choose captured graphs by device-side lengths.

Needs cuda-bindings (its runtime, driver and NVRTC modules) and a driver of CUDA 12.8 or newer. The one kernel here calls
`cudaGraphSetConditional`; NVRTC compiles it alone, the symbol is resolved when the module is loaded.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspine.common.errors import BackendError

SWITCH_DRIVER = 12080  # first CUDA version with SWITCH nodes, as the driver counts: 1000 major + 10 minor

_SOURCE = b"""
extern "C" __device__ void cudaGraphSetConditional(unsigned long long handle, unsigned int value);
extern "C" __global__ void dspine_choose(unsigned long long handle, const int* length, int first, int count) {
    int body = *length - first;
    body = body < 0 ? 0 : body;
    cudaGraphSetConditional(handle, body < count ? body : count - 1);
}
"""


def switch_support(device: torch.device) -> tuple[bool, str]:
    """Whether SWITCH nodes can be used on `device`, and the reason in words."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False, f"no CUDA on {device}"
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        return False, "cuda-bindings is not installed"
    try:
        from cuda.bindings import nvrtc, runtime
    except (ImportError, OSError, RuntimeError) as error:  # a package without its library
        return False, f"cuda-bindings does not import ({error})"
    if not hasattr(runtime, "cudaGraphConditionalHandleCreate"):
        return False, "cuda-bindings is too old for conditional nodes"
    error, version = runtime.cudaDriverGetVersion()
    if int(error) != 0 or version < SWITCH_DRIVER:
        return False, f"the driver serves CUDA {version // 1000}.{version % 1000 // 10}, SWITCH nodes need 12.8"
    try:
        result, *found = nvrtc.nvrtcVersion()
    except RuntimeError as error:  # cuda-bindings raises it where the library is not found
        return False, f"NVRTC is not installed ({error})"
    if int(result) != 0:
        return False, f"NVRTC does not answer (error {int(result)})"
    return True, f"conditional graphs: driver CUDA {version // 1000}.{version % 1000 // 10}, NVRTC {found[0]}.{found[1]}"


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The value of a cuda-bindings call; BackendError where it failed."""
    error, *values = result
    if int(error) != 0:
        raise BackendError(f"CUDA graphs: {what} failed with {error!s}; use graphs off, or report this driver")
    return values[0] if len(values) == 1 else values


def compile_source(capability: tuple[int, int]) -> bytes:
    """CUBIN of the choosing kernel for one compute capability."""
    from cuda.bindings import nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(_SOURCE, b"dspine_choose.cu", 0, [], []), "nvrtcCreateProgram")
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}".encode(), b"--relocatable-device-code=false"]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(error) != 0:
        size = checked(nvrtc.nvrtcGetProgramLogSize(program), "nvrtcGetProgramLogSize")
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise BackendError(f"CUDA graphs: NVRTC could not compile the choosing kernel: {log.decode(errors='replace').strip()}")
    size = checked(nvrtc.nvrtcGetCUBINSize(program), "nvrtcGetCUBINSize")
    image = b" " * size
    checked(nvrtc.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
    return image


class SwitchGraph:
    """One launch for a whole round: child graphs one behind another, and switches between them.

    `child` and `switch` append in order; `finish` instantiates (once); `launch` runs it on torch's current stream. The
    `torch.cuda.CUDAGraph`s handed in must have been made with `keep_graph=True` and stay alive as long as this: the memory that
    they use is theirs.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver, runtime

        self._driver, self._runtime, self._device = driver, runtime, device
        self._graph = checked(runtime.cudaGraphCreate(0), "cudaGraphCreate")
        self._last: list[Any] = []
        self._kept: list[Any] = []
        self._exec: Any = None
        image = compile_source(torch.cuda.get_device_capability(device))
        self._module = checked(driver.cuModuleLoadData(image), "cuModuleLoadData")
        self._function = checked(driver.cuModuleGetFunction(self._module, b"dspine_choose"), "cuModuleGetFunction")

    def child(self, graph: torch.cuda.CUDAGraph) -> None:
        """A captured graph behind everything added so far."""
        runtime = self._runtime
        inner = runtime.cudaGraph_t(graph.raw_cuda_graph())
        made = runtime.cudaGraphAddChildGraphNode(self._graph, self._last, len(self._last), inner)
        self._last = [checked(made, "cudaGraphAddChildGraphNode")]
        self._kept.append(graph)

    def switch(self, length: Tensor, first: int, graphs: Sequence[torch.cuda.CUDAGraph]) -> None:
        """graphs[length - first], by `length` int32 [1] on the device (clamped to what there is)."""
        runtime = self._runtime
        handle = checked(runtime.cudaGraphConditionalHandleCreate(self._graph, 0, 0), "cudaGraphConditionalHandleCreate")
        self._choose(handle, length, first, len(graphs))
        params = runtime.cudaGraphNodeParams()
        params.type = runtime.cudaGraphNodeType.cudaGraphNodeTypeConditional
        params.conditional.handle = handle
        params.conditional.type = runtime.cudaGraphConditionalNodeType.cudaGraphCondTypeSwitch
        params.conditional.size = len(graphs)
        made = runtime.cudaGraphAddNode(self._graph, self._last, None, len(self._last), params)
        self._last = [checked(made, "cudaGraphAddNode (SWITCH)")]
        for body, graph in zip(params.conditional.phGraph_out, graphs, strict=False):
            inner = runtime.cudaGraph_t(graph.raw_cuda_graph())
            checked(runtime.cudaGraphAddChildGraphNode(body, [], 0, inner), "cudaGraphAddChildGraphNode (body)")
            self._kept.append(graph)

    def _choose(self, handle: Any, length: Tensor, first: int, count: int) -> None:
        """The kernel that sets a switch's value."""
        driver, runtime = self._driver, self._runtime
        values = (
            ctypes.c_ulonglong(int(handle)), ctypes.c_void_p(length.data_ptr()), ctypes.c_int(first), ctypes.c_int(count)
        )  # fmt: skip
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = self._function
        params.gridDimX = params.gridDimY = params.gridDimZ = 1
        params.blockDimX = params.blockDimY = params.blockDimZ = 1
        params.sharedMemBytes = 0
        params.kernelParams = ctypes.addressof(pointers)
        before = [driver.CUgraphNode(int(node)) for node in self._last]
        made = driver.cuGraphAddKernelNode(driver.CUgraph(int(self._graph)), before, len(before), params)
        self._last = [runtime.cudaGraphNode_t(int(checked(made, "cuGraphAddKernelNode")))]
        self._kept += [length, values, pointers]

    def finish(self) -> SwitchGraph:
        """Instantiate and upload."""
        runtime = self._runtime
        self._exec = checked(runtime.cudaGraphInstantiate(self._graph, 0), "cudaGraphInstantiate")
        return self

    def replay(self) -> None:
        """Launch on torch's current stream."""
        stream = self._runtime.cudaStream_t(torch.cuda.current_stream(self._device).cuda_stream)
        checked(self._runtime.cudaGraphLaunch(self._exec, stream), "cudaGraphLaunch")

    def close(self) -> None:
        """Free the graph; nothing of it may be running."""
        if self._exec is not None:
            self._runtime.cudaGraphExecDestroy(self._exec)
            self._runtime.cudaGraphDestroy(self._graph)
            self._driver.cuModuleUnload(self._module)
            self._exec = None
            self._kept.clear()
