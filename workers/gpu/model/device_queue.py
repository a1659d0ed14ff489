"""A device as a queue: work is handed over in order, and its results are taken later.

On CUDA the queue is the current stream: work only enqueues kernels, so that it is run at once, and
its result is complete when an event recorded after it has passed. On a CPU it is one thread that
runs the work in order; or nothing at all, where steps do not overlap: then work runs when it is
handed over.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class Work(Generic[T]):
    """Something that a device has to do."""

    def __init__(self, run: Callable[[], T]) -> None:
        self._run: Callable[[], T] | None = run
        self._value: T | None = None
        self.error: Exception | None = None
        """The error that it raised."""
        self._over = threading.Lock()
        self._over.acquire()
        self.event: torch.cuda.Event | None = None
        """On CUDA: passes when the device has done all of it."""
        self.seconds = 0.0
        """How long it took, where that is known: on a CPU."""

    def do(self) -> None:
        """Runs it, once: in the queue's turn."""
        assert self._run is not None
        began = time.monotonic()
        try:
            self._value = self._run()
        except Exception as error:
            self.error = error
        self.seconds = time.monotonic() - began
        # Its tensors are freed with the work, not with its result.
        self._run = None
        self._over.release()

    @property
    def value(self) -> T:
        """Its result, for later work in the same queue; raises its error."""
        if self.error is not None:
            raise self.error
        return self._value  # type: ignore[return-value]

    @property
    def done(self) -> bool:
        """Whether the device has done it."""
        return not self._over.locked() and (self.event is None or self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Returns when the device has done it, with or without an error."""
        with self._over:
            pass
        if self.event is not None:
            self.event.synchronize()

    def result(self) -> T:
        """Its result, once the device has done it; raises its error."""
        self.wait()
        return self.value


class DeviceQueue(Protocol):
    """Does work in the order in which it is handed over."""

    overlaps: bool
    """Whether ``submit`` returns before the work is done."""

    def submit(self, run: Callable[[], T]) -> Work[T]:
        """Hands work over."""
        ...


class InlineQueue:
    """Does work when it is handed over."""

    overlaps = False

    def submit(self, run: Callable[[], T]) -> Work[T]:
        work = Work(run)
        work.do()
        return work


class StreamQueue:
    """The current CUDA stream of a device: work enqueues kernels and must not wait for them."""

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
    # OpenMP's number of threads belongs to the thread that calls it.
    torch.set_num_threads(num_threads)
    while (work := orders.get()) is not None:
        work.do()
        # Not until the next order comes: what it gave may be large.
        del work


def pinned(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on the host, from where the device copies it while the host goes on."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def on_device(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """An array on a device, without waiting for what the device does."""
    tensor = pinned(values, device)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def device_queue(device: torch.device, overlap: bool) -> DeviceQueue:
    """The queue of a device; ``overlap``: work is done while its results are waited for."""
    if device.type == "cuda":
        return StreamQueue(device)
    return ThreadQueue() if overlap else InlineQueue()
