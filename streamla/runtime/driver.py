"""Launch cubins through the CUDA driver API, on torch's current stream and in torch's context.

`Kernel` states once what a kernel takes and how it is launched. A launch packs the arguments with one
`struct` call, which also checks their number and types, into a buffer that the driver reads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

# Parameter types: the `struct` codes of what the kernel declares.
PTR, I32, U32, I64, F32 = "P", "i", "I", "q", "f"
TENSOR_MAP_BYTES = 128
TENSOR_MAP = f"{TENSOR_MAP_BYTES}s"
_WORDS = {
    PTR: "a pointer (int)", I32: "int32", U32: "uint32", I64: "int64", F32: "float",
    TENSOR_MAP: "a tensor map (bytes)",
}  # fmt: skip

_PORTABLE_CLUSTER = 8  # larger clusters must be asked for
_INVALID_CONTEXT = 201


class DriverError(RuntimeError):
    """The CUDA driver is missing or refused a call."""


class Kernel:
    """One entry of a cubin, on every device it is used on.

    Args:
        cubin: the compiled module, or a function that returns it (called at the first load).
        name: the kernel's `extern "C"` name.
        params: the kernel's parameters in order, each of PTR, I32, U32, I64, F32, TENSOR_MAP.
        threads: threads a program.
        shared_bytes: dynamic shared memory a program; above 48 KB it is opted into.
        cooperative: all programs are resident at once, or the launch is refused.
        cluster: programs a cluster.
        pdl: programmatic dependent launch: the kernel may start before the one ahead of it in the
            stream has ended, and must wait (griddepcontrol.wait) before it touches its results.
    """

    def __init__(
        self,
        cubin: bytes | Callable[[], bytes],
        name: str,
        params: Sequence[str],
        *,
        threads: int,
        shared_bytes: int = 0,
        cooperative: bool = False,
        cluster: int = 1,
        pdl: bool = False,
    ) -> None:
        self.name = name
        self.params = tuple(params)
        self.threads = threads
        self.shared_bytes = shared_bytes
        self.cooperative = cooperative
        self.cluster = cluster
        self.pdl = pdl
        self._cubin = cubin
        self._functions: dict[int, Any] = {}
        # The driver copies the arguments during the call, so one buffer serves every launch in turn.
        self._lock = threading.Lock()
        self._config: Any = None
        self._layout = struct.Struct("@" + "".join(self.params))
        self._arguments = ctypes.create_string_buffer(max(1, self._layout.size))
        base = ctypes.addressof(self._arguments)
        # A zero count pads to the alignment of its type: the size up to it is the parameter's offset.
        offsets = [
            struct.calcsize(f"@{''.join(self.params[:i])}0{code[-1]}")
            for i, code in enumerate(self.params)
        ]
        self._pointers = (ctypes.c_void_p * max(1, len(offsets)))(*(base + o for o in offsets))
        self._pointers_address = ctypes.addressof(self._pointers)

    def launch(
        self,
        grid: int | tuple[int, int, int],
        *args: int | float | bytes,
        device: int | None = None,
    ) -> None:
        """Launch `grid` programs on torch's current stream of `device`; an empty grid does nothing.

        Args:
            args: one for each of `params`; a pointer is `tensor.data_ptr()`, or 0 for none, a tensor map
                what `encode_tensor_map` returned.
            device: index, the current device by default.
        """
        driver = cuda_driver()
        current = torch.cuda.current_device()
        device = current if device is None else device
        function = self._functions.get(device)
        if function is None:
            self._check(args)
            function = self.load(device)
        x, y, z = (grid, 1, 1) if isinstance(grid, int) else grid
        if not x * y * z:
            return
        with self._lock:
            try:
                self._layout.pack_into(self._arguments, 0, *args)
            except (struct.error, TypeError):
                self._check(args)
                raise
            config = self._config
            config.gridDimX, config.gridDimY, config.gridDimZ = x, y, z
            config.hStream = torch._C._cuda_getCurrentRawStream(device)
            call = (config, function, self._pointers_address, 0)
            status = _INVALID_CONTEXT
            if device == current:
                (status,) = driver.cuLaunchKernelEx(*call)
            # Another device is current, or this thread has not used the GPU yet.
            if status == _INVALID_CONTEXT:
                with _primary_context(device):
                    (status,) = driver.cuLaunchKernelEx(*call)
        if status:
            _fail(driver, status, f"launch of {self.name} (grid {grid}, {self.threads} threads)")

    def load(self, device: int | None = None) -> Any:
        """The function on `device`, compiled and loaded if it is not yet. Refused in a graph capture."""
        driver = cuda_driver()
        device = torch.cuda.current_device() if device is None else device
        with self._lock:
            if device in self._functions:
                return self._functions[device]
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"kernel {self.name} is not loaded on cuda:{device} and cannot be while a CUDA "
                    f"graph is captured: call streamla.warmup(spec, batch_sizes) before the capture"
                )
            if callable(self._cubin):
                self._cubin = self._cubin()
            attributes = driver.CUfunction_attribute
            with _primary_context(device):
                module = _checked(driver, driver.cuModuleLoadData(self._cubin), "cuModuleLoadData")
                function = _checked(
                    driver,
                    driver.cuModuleGetFunction(module, self.name.encode()),
                    f"cuModuleGetFunction({self.name})",
                )
                wanted = {
                    attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: self.shared_bytes,
                    attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED: int(
                        self.cluster > _PORTABLE_CLUSTER
                    ),
                }
                for attribute, value in wanted.items():
                    if value:
                        result = driver.cuFuncSetAttribute(function, attribute, value)
                        _checked(driver, result, f"{self.name}: {attribute.name} = {value}")
            if self._config is None:
                self._config = self._launch_config(driver)
            self._functions[device] = function
            return function

    def resident_programs(self, device: int | None = None) -> int:
        """Most programs that run at once on `device`: the largest grid of a cooperative launch."""
        driver = cuda_driver()
        device = torch.cuda.current_device() if device is None else device
        function = self.load(device)
        with _primary_context(device), self._lock:
            if self.cluster > 1:
                config = self._config
                config.gridDimX, config.gridDimY, config.gridDimZ = self.cluster, 1, 1
                result = driver.cuOccupancyMaxActiveClusters(function, config)
                return self.cluster * _checked(driver, result, "cuOccupancyMaxActiveClusters")
            result = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                function, self.threads, self.shared_bytes
            )
            per_unit = _checked(driver, result, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
        return per_unit * torch.cuda.get_device_properties(device).multi_processor_count

    def _launch_config(self, driver: ModuleType) -> Any:
        ids = driver.CUlaunchAttributeID
        attrs = []

        def attribute(id: Any) -> Any:
            entry = driver.CUlaunchAttribute()
            entry.id = id
            attrs.append(entry)
            return entry.value

        if self.cooperative:
            attribute(ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE).cooperative = 1
        if self.cluster > 1:
            dim = attribute(ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION).clusterDim
            dim.x, dim.y, dim.z = self.cluster, 1, 1
        if self.pdl:
            value = attribute(ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
            value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.shared_bytes
        config.attrs = attrs
        config.numAttrs = len(attrs)
        return config

    def _check(self, args: Sequence[Any]) -> None:
        """Refuse arguments that are not what the kernel takes. Slow, so only before the first launch
        and after a failed packing. Stricter than packing, which takes a one-element tensor for its
        value."""
        if len(args) != len(self.params):
            raise TypeError(f"{self.name}: need {len(self.params)} arguments; got {len(args)}")
        for i, (code, value) in enumerate(zip(self.params, args, strict=True)):
            try:
                if isinstance(value, torch.Tensor):
                    raise TypeError
                struct.pack(f"@{code}", value)
            except (struct.error, TypeError):
                came = "a tensor" if isinstance(value, torch.Tensor) else repr(value)
                raise TypeError(
                    f"{self.name}: argument {i}: need {_WORDS[code]}; got {came}"
                ) from None


def encode_tensor_map(
    address: int, *, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> bytes:
    """A tensor of 16-bit elements as the copy engine reads it, for a parameter of type TENSOR_MAP.

    Shared memory gets the 128-byte swizzle of wgmma.

    Args:
        shape: elements of each dimension, the contiguous one first.
        strides: bytes, of every dimension but the first.
        box: elements of each dimension that one copy takes; the first makes 128 bytes.
    """
    driver = cuda_driver()
    types, swizzles = driver.CUtensorMapDataType, driver.CUtensorMapSwizzle
    promotions, fills = driver.CUtensorMapL2promotion, driver.CUtensorMapFloatOOBfill
    result = driver.cuTensorMapEncodeTiled(
        types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        len(shape),
        address,
        [driver.cuuint64_t(n) for n in shape],
        [driver.cuuint64_t(n) for n in strides],
        [driver.cuuint32_t(n) for n in box],
        [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
        promotions.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        fills.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return struct.pack("16Q", *map(int, _checked(driver, result, "cuTensorMapEncodeTiled").opaque))


@functools.cache
def cuda_driver() -> ModuleType:
    """The driver API, initialised."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DriverError(
            "CUDA kernels need the package cuda-bindings; it comes with torch's CUDA wheels"
        ) from error
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError as error:  # no libcuda
        raise DriverError(
            f"CUDA kernels need an NVIDIA driver; there is none here ({error})"
        ) from error
    if status:
        _fail(driver, status, "cuInit")
    return driver


@functools.cache
def _retained_context(device: int) -> Any:
    """The primary context of `device`, which is the one torch works in."""
    driver = cuda_driver()
    handle = _checked(driver, driver.cuDeviceGet(device), f"cuDeviceGet({device})")
    return _checked(driver, driver.cuDevicePrimaryCtxRetain(handle), "cuDevicePrimaryCtxRetain")


@contextlib.contextmanager
def _primary_context(device: int) -> Iterator[None]:
    driver = cuda_driver()
    _checked(driver, driver.cuCtxPushCurrent(_retained_context(device)), "cuCtxPushCurrent")
    try:
        yield
    finally:
        _checked(driver, driver.cuCtxPopCurrent(), "cuCtxPopCurrent")


def _checked(driver: ModuleType, result: tuple[Any, ...], call: str) -> Any:
    status, *values = result
    if status:
        _fail(driver, status, call)
    return values[0] if values else None


def _fail(driver: ModuleType, status: Any, call: str) -> None:
    text = driver.cuGetErrorString(status)[1]
    raise DriverError(f"{call}: {status.name} ({text.decode() if text else 'no description'})")
