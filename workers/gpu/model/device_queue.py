"""A device as a queue: work is submitted in order, and its results are read later.

On CUDA the queue is the current stream. ``submit`` calls the submitted function at once. The
function only enqueues kernels. ``submit`` then records an event. The result is complete when the
device has reached this event. On other devices, one thread runs the work in order. If steps do not
overlap with the host's work, ``submit`` itself runs the work.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

T = TypeVar("T")
ALIGNMENT = 16
"""Alignment of the arrays in one buffer, in bytes: the size of the widest load of a kernel."""


class Work(Generic[T]):
    """A function that runs on the device queue, and its result."""

    def __init__(self, run: Callable[[], T]) -> None:
        self._run: Callable[[], T] | None = run
        self._value: T | None = None
        self.error: Exception | None = None
        """The exception that the function raised; None if it has not raised one."""
        self._over = threading.Lock()
        self._over.acquire()
        self.event: torch.cuda.Event | None = None
        """On CUDA: the event that is complete when the device has finished the work."""
        self.seconds = 0.0
        """Time for which the function ran, in seconds. On CUDA, this is only the time to enqueue
        the kernels."""

    def do(self) -> None:
        """Runs the function. The queue calls this method once for each ``Work``, in the order of
        submission."""
        assert self._run is not None
        began = time.monotonic()
        try:
            self._value = self._run()
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - began
        # The function is dropped now, so that the tensors to which it refers are freed before the
        # result is.
        self._run = None
        self._over.release()

    @property
    def value(self) -> T:
        """The result. Before ``wait``, only later work of the same queue may use the result,
        because kernels may still compute it. Raises the function's error."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    @property
    def done(self) -> bool:
        """Whether the device has finished the work."""
        return not self._over.locked() and (self.event is None or self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits until the device has finished the work, with or without an error."""
        with self._over:
            pass
        if self.event is not None:
            self.event.synchronize()

    def result(self) -> T:
        """Waits for the device, and returns the result. Raises the function's error."""
        self.wait()
        return self.value


class DeviceQueue(Protocol):
    """Runs work in the order in which it is submitted."""

    overlaps: bool
    """Whether ``submit`` returns before the work is done."""

    def submit(self, run: Callable[[], T]) -> Work[T]:
        """Submits work."""
        ...


class InlineQueue:
    """Runs work when it is submitted."""

    overlaps = False

    def submit(self, run: Callable[[], T]) -> Work[T]:
        work = Work(run)
        work.do()
        return work


class StreamQueue:
    """The current CUDA stream of a device. Work enqueues kernels and must not wait for them."""

    overlaps = True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def submit(self, run: Callable[[], T]) -> Work[T]:
        work = Work(run)
        work.do()
        work.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        work.event.record(torch.cuda.current_stream(self._device))
        return work


class ThreadQueue:
    """A thread of this process, which ends when the queue is no longer used."""

    overlaps = True

    def __init__(self) -> None:
        self._orders: SimpleQueue[Work[Any] | None] = SimpleQueue()
        args = (self._orders, torch.get_num_threads())
        threading.Thread(target=_serve, args=args, name="device", daemon=True).start()
        weakref.finalize(self, self._orders.put, None)

    def submit(self, run: Callable[[], T]) -> Work[T]:
        work = Work(run)
        self._orders.put(work)
        return work


def _serve(orders: SimpleQueue[Work[Any] | None], num_threads: int) -> None:
    # In OpenMP, each calling thread has its own setting of the number of threads. So this thread
    # sets the number too.
    torch.set_num_threads(num_threads)
    while (work := orders.get()) is not None:
        work.do()
        # This reference to the work is dropped before the next work arrives, because the result may
        # be large.
        del work


def pinned(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array as a tensor. For a GPU, the tensor is in pinned memory, so that copying it to
    the device does not block the host."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """A host array as a tensor on a device. The host does not wait for the copy."""
    tensor = pinned(values, device)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def together_on_device(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copies arrays to a device in one transfer. On a GPU, the tensors are views of one buffer; on
    a CPU, they share the arrays' memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    ends = np.cumsum([-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays]).tolist()
    # The buffer is never empty, because views of an empty tensor cannot have another dtype.
    buffer = np.zeros(max(ends[-1], ALIGNMENT), dtype=np.uint8)
    starts = [0, *ends[:-1]]
    for start, array in zip(starts, arrays, strict=True):
        buffer[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    moved = on_device(buffer, device)
    return [
        moved[start : start + array.nbytes]
        .view(torch.from_numpy(array[:0]).dtype)
        .view(array.shape)
        for start, array in zip(starts, arrays, strict=True)
    ]


def device_queue(device: torch.device, overlap: bool) -> DeviceQueue:
    """The queue of a device. ``overlap``: whether work runs while the caller continues. On CUDA,
    work always does."""
    if device.type == "cuda":
        return StreamQueue(device)
    return ThreadQueue() if overlap else InlineQueue()
