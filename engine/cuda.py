"""Bytes between host memory and MLX's on an NVIDIA GPU, past the page faults.

MLX's arrays there are managed memory: what the host writes is moved to the device page by page when
a kernel first touches it, at 2 to 4 GB/s. A copy by the driver into pages that are on the device
already runs at the speed of the bus, from host memory that is page-locked at ten times that of
other memory. MLX has no such calls; the driver's own are made here.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from engine.cachekinds import Bytes
from kvdb.prefetch import Staging

log = logging.getLogger("kvdb.engine")

Host = npt.NDArray[Any]
PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE
KEPT_BYTES = 2 << 30
DTYPES = {
    "|u1": mx.uint8,
    "<u2": mx.uint16,
    "<u4": mx.uint32,
    "<f2": mx.float16,
    "<f4": mx.float32,
}


class Uplink(NamedTuple):
    """How bytes reach the device and come back: read into ``staging``, then ``upload`` makes an
    MLX array of a contiguous host array, which may be overwritten afterwards; ``download`` makes a
    host array of a flat uint8 one of MLX's, which is the caller's until it is dropped."""

    upload: Callable[[Host], mx.array]
    download: Callable[[mx.array], Bytes]
    staging: Staging


def open_uplink() -> Uplink:
    """The fastest way there is: through the driver, else by MLX's own copy. Make it, and call its
    ``upload`` and ``download``, on the MLX thread only."""
    plain = Uplink(mx.array, np.array, Staging())
    if mx.metal.is_available() or mx.default_device().type != mx.DeviceType.gpu:
        return plain
    mx.eval(mx.zeros(1))  # from here on this thread has MLX's context
    try:
        driver = _Driver()
    except (OSError, AttributeError) as error:
        log.warning("blocks go to the device more slowly: %s", error)
        return plain
    return Uplink(driver.upload, driver.download, Staging(driver.page_locked))


class _Driver:
    """The calls of libcuda that are used, in the context of the thread that makes it."""

    def __init__(self) -> None:
        self._recycled = Recycled(self._lock_pages, self._unlock_pages)
        self._cuda: Any = ctypes.CDLL("libcuda.so.1")
        self._cuda.cuMemcpyHtoD_v2.argtypes = (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t)
        self._cuda.cuMemcpyDtoH_v2.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t)
        self._cuda.cuMemHostAlloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
        self._cuda.cuMemFreeHost.argtypes = (ctypes.c_void_p,)
        self._cuda.cuCtxSetCurrent.argtypes = (ctypes.c_void_p,)
        self._context = ctypes.c_void_p()
        if self._cuda.cuCtxGetCurrent(ctypes.byref(self._context)) or not self._context:
            raise OSError("there is no CUDA context")

    def upload(self, host: Host) -> mx.array:
        # Zeroing is what puts the pages on the device; it must be over before the copy begins.
        array = mx.zeros(host.shape, dtype=DTYPES[host.dtype.str])
        mx.eval(array)
        mx.synchronize()
        target = np.array(array, copy=False).ctypes.data  # its address: nothing is moved or read
        if self._cuda.cuMemcpyHtoD_v2(target, host.ctypes.data, host.nbytes):
            return mx.array(host)
        return array

    def download(self, array: mx.array) -> Bytes:
        mx.eval(array)
        mx.synchronize()
        source = np.array(array, copy=False).ctypes.data
        host = self._recycled.lend(array.size)
        if self._cuda.cuMemcpyDtoH_v2(host.ctypes.data, source, host.nbytes):
            return np.array(array)
        return host

    def page_locked(self, nbytes: int) -> Bytes:
        """Host memory that the device can read directly; ordinary memory where there is no more.
        From any thread."""
        return self._recycled.lend(nbytes)

    def _lock_pages(self, nbytes: int) -> int | None:
        address = ctypes.c_void_p()
        if self._cuda.cuCtxSetCurrent(self._context) or self._cuda.cuMemHostAlloc(
            ctypes.byref(address), nbytes, PORTABLE
        ):
            return None
        return address.value

    def _unlock_pages(self, address: int) -> None:
        self._cuda.cuCtxSetCurrent(self._context)
        self._cuda.cuMemFreeHost(address)


class Recycled:
    """Memory of ``allocate`` (its address, or None) as arrays. What is dropped is lent again, up to
    ``kept`` bytes: page-locking costs as much as the copy that it speeds up. From any thread."""

    def __init__(
        self,
        allocate: Callable[[int], int | None],
        free: Callable[[int], None],
        kept: int = KEPT_BYTES,
    ) -> None:
        self._allocate = allocate
        self._free = free
        self._kept = kept
        self._idle: deque[tuple[int, int]] = deque()  # address, bytes: the latest last

    def lend(self, nbytes: int) -> Bytes:
        """``nbytes`` bytes of any content; ordinary memory where there is none to be had."""
        address = self._idle_of(nbytes) or self._allocate(nbytes)
        if address is None:
            return np.empty(nbytes, np.uint8)
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        # All arrays that look into it keep this object alive.
        finalizer = weakref.finalize(memory, self._take_back, address, nbytes)
        finalizer.atexit = False  # the driver may be gone by then, and the process takes it along
        return np.ctypeslib.as_array(memory)

    def _idle_of(self, nbytes: int) -> int | None:
        for _ in range(len(self._idle)):
            try:
                address, size = self._idle.pop()
            except IndexError:  # another thread was faster
                return None
            if size == nbytes:
                return address
            self._idle.appendleft((address, size))
        return None

    def _take_back(self, address: int, nbytes: int) -> None:
        self._idle.append((address, nbytes))
        while sum(size for _, size in tuple(self._idle)) > self._kept:
            try:
                oldest, _ = self._idle.popleft()
            except IndexError:
                return
            self._free(oldest)
