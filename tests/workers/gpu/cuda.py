"""Streams and graphs of ``torch.cuda`` on a CPU, with the rules of a capture.

A capture records the operations that torch dispatches, and a replay runs them again on the same
tensors. Values that the host read during the capture do not change. As on CUDA, a capture that
another call has broken fails at its end, and ``torch.cuda.graph`` then leaves its stream current.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal.default")
"""Operations that wait for the device, which a capture does not permit."""


class Stream:
    """A stream. A CPU computes at once, so the stream does not order work."""

    def __init__(self, device: Any = None) -> None:
        self.waited_for: list[Stream] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)


class Graph:
    """A captured graph."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self.operations: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        """Runs the captured operations again."""
        self._cuda.replays += 1
        for function, args, kwargs, outputs in self.operations:
            again = function(*args, **kwargs)
            inside = {_address(t) for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
            for old, new in zip(tree_leaves(outputs), tree_leaves(again), strict=True):
                if torch.is_tensor(old) and _address(old) not in inside:
                    old.copy_(new)


class Capture(TorchDispatchMode):
    """A stand-in for ``torch.cuda.graph``."""

    def __init__(self, cuda: Cuda, graph: Graph, options: dict[str, Any]) -> None:
        super().__init__()
        self._cuda = cuda
        self.graph = graph
        self.mode: str = options.get("capture_error_mode", "global")
        self.pool = options.get("pool")
        self.stream: Stream = options.get("stream") or Stream()
        self.thread = threading.get_ident()
        self.broken = ""

    def __enter__(self) -> Capture:
        self._before, self._cuda.current = self._cuda.current, self.stream
        self._cuda.capturing = self
        super().__enter__()
        self._cuda.captures.append(self)
        self._cuda.on_capture()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._cuda.capturing = None
        if self.broken or error[0] is not None:
            raise RuntimeError(f"CUDA error: {self.broken or 'operation failed'}")
        self._cuda.current = self._before

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(name in str(function) for name in SYNCHRONIZING):
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        outputs = function(*args, **(kwargs or {}))
        self.graph.operations.append((function, args, kwargs or {}, outputs))
        return outputs


class Cuda:
    """A stand-in for the device and the functions of ``torch.cuda``."""

    def __init__(self) -> None:
        self.default = self.current = Stream()
        self.capturing: Capture | None = None
        self.captures: list[Capture] = []
        self.replays = 0
        self.on_capture: Callable[[], None] = lambda: None
        """Called at the beginning of each capture."""

    def malloc(self) -> None:
        """Allocates memory on the calling thread. This breaks a capture of the thread, and in mode
        ``global`` a capture of any thread."""
        capture = self.capturing
        if capture is not None and (
            capture.mode == "global" or capture.thread == threading.get_ident()
        ):
            capture.broken = "operation would make the capture unsafe"

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replaces the functions of ``torch.cuda``."""
        for name, stand_in in {
            "Stream": Stream,
            "stream": self._with,
            "current_stream": lambda device=None: self.current,
            "CUDAGraph": lambda: Graph(self),
            "graph": lambda graph, **options: Capture(self, graph, options),
            "graph_pool_handle": object,
        }.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    @contextmanager
    def _with(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)
