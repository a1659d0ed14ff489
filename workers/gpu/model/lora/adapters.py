"""The LoRA adapters of a model. In a forward, each token may have an adapter.

The model's weights are not changed. A forward hook of each linear module adds the adapters' updates
to the module's output. If no token of the forward has an adapter, the hook does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from ..device_queue import on_device
from .peft_layout import Adapter, AdapterError, Update, naming

PROBE_TOKENS = 4
"""Number of tokens of the forward with which an adapter is tried when it is loaded."""


class _Rows(NamedTuple):
    """For each row of a linear module's input: the number of the row's adapter."""

    num_rows: int
    parts: Sequence[tuple[int, torch.Tensor | None]]
    """Pairs of an adapter's number and the indices of its rows; None stands for all rows."""


class Adapters:
    """The adapters of one model, numbered from 1; the number 0 stands for the model itself."""

    def __init__(self, model: Any, adapters: Sequence[Adapter]) -> None:
        """Adds hooks to the linear modules of ``model``, a model of transformers. Raises
        AdapterError if an adapter does not fit the model."""
        # The adapters themselves are not kept, because the hooks have their updates.
        self._hashes = {adapter.name: adapter.hash for adapter in adapters}
        self._numbers = {adapter.name: number for number, adapter in enumerate(adapters, 1)}
        self._active: tuple[_Rows, _Rows] | None = None
        """The rows of the running forward: first the rows of the modules before the output layer,
        then the rows of the output layer. None if the forward has no adapters."""
        self.num_bytes = 0
        """Size of all updates in memory, in bytes."""
        modules = dict(model.named_modules())
        updates: dict[str, dict[int, Update]] = {}
        for adapter in adapters:
            for path, update in adapter.updates.items():
                with naming(adapter.name):
                    _check(path, modules.get(path), update)
                    own = _converted(path, update, model)
                self.num_bytes += own.a.nbytes + own.b.nbytes
                updates.setdefault(path, {})[self._numbers[adapter.name]] = own
        head = model.get_output_embeddings()
        for path, by_number in updates.items():
            module = modules[path]
            module.register_forward_hook(partial(self._add, by_number, module is head))
        for adapter in adapters:
            with naming(adapter.name):
                self._try(model, modules, adapter)

    @property
    def names(self) -> Iterable[str]:
        """The names of the adapters in the order of their numbers."""
        return self._hashes

    def number(self, name: str) -> int:
        """The number of an adapter; 0 if ``name`` is empty."""
        return self._numbers[name] if name else 0

    def hash(self, name: str) -> str:
        """The hash of an adapter."""
        return self._hashes[name]

    @contextmanager
    def applied(
        self, tokens: np.ndarray, outputs: np.ndarray, device: torch.device
    ) -> Iterator[None]:
        """A context in which a forward of the model has adapters. ``tokens``: for each token, the
        number of its adapter. ``outputs``: the same for the tokens whose logits are computed."""
        self._active = _rows(tokens, device), _rows(outputs, device)
        try:
            yield
        finally:
            self._active = None

    def _add(
        self,
        updates: Mapping[int, Update],
        is_head: bool,
        module: torch.nn.Module,
        inputs: tuple[torch.Tensor, ...],
        output: torch.Tensor,
    ) -> torch.Tensor | None:
        """A forward hook that adds the updates of a linear module to the module's output."""
        if self._active is None:
            return None
        rows = self._active[is_head]
        x, y = inputs[0].flatten(0, -2), output.flatten(0, -2)
        if len(x) != rows.num_rows:
            raise RuntimeError(f"a linear module has {len(x)} rows; expected {rows.num_rows}")
        for number, indices in rows.parts:
            update = updates.get(number)
            if update is None:
                continue
            own = x if indices is None else x[indices]
            added = (own.to(update.a.dtype) @ update.a.t() @ update.b.t()).to(y.dtype)
            if indices is None:
                y.add_(added)
            else:
                y.index_add_(0, indices, added)
        return y.view(output.shape)

    @torch.inference_mode()
    def _try(self, model: Any, modules: Mapping[str, torch.nn.Module], adapter: Adapter) -> None:
        """Raises AdapterError if the model does not call each module of an adapter once, with all
        tokens."""
        called: list[str] = []
        paths = adapter.updates
        hooks = [modules[path].register_forward_hook(_noting(called, path)) for path in paths]
        ids = torch.arange(PROBE_TOKENS, device=model.device).unsqueeze(0)
        numbers = np.full(PROBE_TOKENS, self._numbers[adapter.name])
        try:
            with self.applied(numbers, numbers, model.device):
                model(ids, position_ids=ids, use_cache=False)
        except Exception as error:
            raise AdapterError(f"a forward fails: {error}") from error
        finally:
            for hook in hooks:
                hook.remove()
        if sorted(called) != sorted(paths):
            wrong = next(path for path in paths if called.count(path) != 1)
            raise AdapterError(
                f"a forward of a {type(model).__name__} calls the module {wrong} "
                f"{called.count(wrong)} times; expected once"
            )


def _noting(called: list[str], path: str) -> Callable[..., None]:
    return lambda *_: called.append(path)


def _rows(numbers: np.ndarray, device: torch.device) -> _Rows:
    present = np.unique(numbers).tolist()
    if len(present) == 1:
        return _Rows(len(numbers), [(present[0], None)])
    where = ((number, np.flatnonzero(numbers == number)) for number in present)
    return _Rows(len(numbers), [(number, on_device(at, device)) for number, at in where])


def _check(path: str, module: torch.nn.Module | None, update: Update) -> None:
    """Raises AdapterError if a module does not exist, is not linear, or does not have the size of
    the update."""
    if module is None:
        raise AdapterError(f"the model has no module {path}")
    if isinstance(module, torch.nn.Linear):
        size = (module.out_features, module.in_features)
    elif isinstance(module, Conv1D):
        size = (module.nf, module.nx)
    else:
        raise AdapterError(f"{path} is a {type(module).__name__}, not a linear module")
    found = (len(update.b), update.a.shape[1])
    if found != size:
        raise AdapterError(f"{path} is {list(size)} and the update is {list(found)}")


def _converted(path: str, update: Update, model: Any) -> Update:
    """An update on the model's device and in its type. Raises AdapterError if a value is not
    finite, for example because the type is too narrow for it."""
    a, b = (half.to(model.device, model.dtype) for half in (update.a, update.b))
    if not (a.isfinite().all() and b.isfinite().all()):
        shown = str(model.dtype).removeprefix("torch.")
        raise AdapterError(f"the update of {path} has values that are not finite in {shown}")
    return Update(a, b)
