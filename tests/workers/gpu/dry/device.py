"""A CUDA device of fake tensors, which have shapes, data types and a device, but no data.

Real steps of a large model run on it without a GPU and without the model's memory. The launches of
a step are counted, and an operation that makes the host wait for the device is a fault. A CPU build
of torch cannot index or copy CUDA tensors from Python. So the methods that index or copy are
replaced by the operations that they call.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenbus.workers.gpu import engine
from tokenbus.workers.gpu.model import device_queue, loader
from tokenbus.workers.gpu.model.cuda import choice
from tokenbus.workers.gpu.model.fused import from_transformers as fused_model
from tokenbus.workers.gpu.model.fused.decoder import AttentionOptions
from tokenbus.workers.gpu.model.kv_cache import LayerShape
from tokenbus.workers.gpu.model.triton import ops
from tokenbus.workers.gpu.sampling import sampler
from tokenbus.workers.gpu.speculation import draft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITING = ("_local_scalar_dense", "nonzero", "aten.equal", "masked_select", "unique")
"""Operations whose result the host waits for."""
PERIOD = 5
"""The tokens of each sequence repeat the numbers from 1 to ``PERIOD``."""
QUERIES = ("prim.device", "prim.layout", "aten.sym_", "aten.size", "aten.stride", "aten.is_")


class Device(TorchDispatchMode):
    """The device, and the counts of its operations since ``counting`` began."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        """Kernels and copies outside of captures, by operation."""
        self.captured: Counter[str] = Counter()
        """The kernels and copies of the largest capture, by operation."""
        self.replays = 0
        self.uploaded = 0
        """Bytes that were copied from the host."""
        self.faults: list[str] = []
        self._arriving: dict[int, torch.Tensor] = {}
        """The results of copies to the host that may not have arrived, by id. The host may use them
        after it has waited for an event."""
        self._capturing = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Counts the operations of the block from 0. Each wait of the host is a fault, and so is
        each warning of the engine, because a failed step only causes a warning."""
        self.launches.clear()
        self.uploaded = 0
        self.faults.clear()
        self.replays = 0
        with pytest.MonkeyPatch.context() as patches:
            for name, given in _WAITS.items():
                patches.setattr(torch, name, given)
            patches.setattr(torch.Tensor, "item", _REAL_ITEM)
            log = logging.getLogger(engine.__name__)
            log.addHandler(warnings := _Warnings(self))
            try:
                yield
            finally:
                log.removeHandler(warnings)

    def fault(self, what: str) -> None:
        """Notes a fault, with the line of the engine that caused it."""
        frame = sys._getframe(1)
        while frame.f_back is not None and "/workers/gpu/" not in frame.f_code.co_filename:
            frame = frame.f_back
        self.faults.append(f"{what} at {frame.f_code.co_filename}:{frame.f_lineno}")

    # --- operations -----------------------------------------------------------------------------

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = str(function), kwargs or {}
        inputs = [t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)]
        on_device = any(t.is_cuda for t in inputs)
        if on_device and any(waiting in name for waiting in WAITING):
            self.fault(f"a wait in {name}")
        if any(id(t) in self._arriving for t in inputs) and not name.startswith(QUERIES):
            self.fault(f"a read of a copy that has not arrived in {name}")
        outputs = function(*args, **kwargs)
        if name.startswith(QUERIES):
            return outputs
        made = [t for t in tree_leaves(outputs) if torch.is_tensor(t)]
        self._check_copy(name, function, args, kwargs, inputs, made)
        if (on_device or any(t.is_cuda for t in made)) and _computes(function, inputs, made):
            (self.captured if self._capturing else self.launches)[_short(name)] += 1
        return outputs

    def _check_copy(
        self, name: str, function: Any, args: Any, kwargs: Any, inputs: Any, made: Any
    ) -> None:
        """Notes a fault if a copy between host and device blocks, or if it is part of a capture."""
        between = name.startswith("aten.copy_") and args[0].device != args[1].device
        if name.startswith(("aten.to.", "aten._to_copy")):
            between = inputs[0].device != made[0].device
        if not between:
            return
        named = [argument.name for argument in function._schema.arguments]
        given = {**dict(zip(named, args, strict=False)), **kwargs}
        if not given.get("non_blocking"):
            self.fault(f"a blocking copy in {name}")
        self._arriving |= {id(t): t for t in made if not t.is_cuda}
        if self._capturing:
            self.fault(f"a copy from the host in a capture: {name}")

    # --- torch's functions ----------------------------------------------------------------------

    def patch(self, patches: pytest.MonkeyPatch) -> None:
        """Replaces functions of ``torch.cuda``, copies, and functions that need data."""
        for name, stand_in in {
            "Stream": _Stream,
            "Event": lambda: _Event(self._arriving.clear),
            "current_stream": lambda device=None: _Stream(),
            "stream": lambda stream: ExitStack(),
            "CUDAGraph": lambda: _Graph(self),
            "graph": lambda graph, **options: self._capture(),
            "graph_pool_handle": object,
        }.items():
            patches.setattr(torch.cuda, name, stand_in)
        methods: dict[str, Callable[..., Any]] = {
            "__getitem__": self._getitem,
            "__setitem__": self._setitem,
            "copy_": lambda t, other, non_blocking=False: _ATEN.copy_(t, other, non_blocking),
            "contiguous": lambda t: t if t.is_contiguous() else _ATEN.clone(t),
            "item": lambda t: 0.0,
        }
        for name, method in methods.items():
            patches.setattr(torch.Tensor, name, _method(method))
        patches.setattr(torch, "tensor", self._tensor)
        for name in _WAITS:
            patches.setattr(torch, name, lambda *args, **kwargs: True)
        self._patch_engine(patches)

    def _patch_engine(self, patches: pytest.MonkeyPatch) -> None:
        for function, stand_in in (
            (device_queue.on_device, self._on_device),
            (device_queue.pinned, self._pinned),
        ):
            name = function.__name__
            for module in list(sys.modules.values()):
                if getattr(module, name, None) is function:
                    patches.setattr(module, name, stand_in)
        # Kernels cannot be timed on this device.
        patches.setattr(choice, "_fastest", lambda loaded, kernels: kernels[0])
        patches.setattr(sampler, "_stacked", self._stacked)
        patches.setattr(sampler.Drawn, "fetch", _fetch)
        patches.setattr(draft_model.Guessed, "fetch", _fetch_guessed)
        patches.setattr(sampler.Scores, "fetch", _fetch_scores)
        patches.setattr(loader, "_probe", _shapes)
        patches.setattr(loader, "_fused", lambda name, *model: fused_model.fused_model(*model))
        # Builds of torch for CUDA include Triton.
        patches.setattr(ops, "why_missing", lambda device: "")
        # The next two functions read values that a forward has computed.
        patches.setattr(fused_model, "_embedding_scale", lambda *args: 1.0)
        patches.setattr(fused_model, "type", _type, raising=False)

    @contextmanager
    def _capture(self) -> Iterator[None]:
        before, self.captured = self.captured, Counter()
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False
            self.captured = max(before, self.captured, key=lambda found: sum(found.values()))

    def _pinned(self, values: np.ndarray, device: torch.device) -> torch.Tensor:
        self.uploaded += values.nbytes
        return torch.empty(values.shape, dtype=torch.from_numpy(values).dtype)

    def _on_device(self, values: np.ndarray, device: torch.device) -> torch.Tensor:
        host = self._pinned(values, device)
        self.launches["upload"] += 1
        return torch.empty(host.shape, dtype=host.dtype, device=device)

    def _stacked(self, arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
        return self._on_device(np.stack(arrays), device)

    def _tensor(self, values: Any, *args: Any, device: Any = None, **options: Any) -> torch.Tensor:
        made: torch.Tensor = _REAL_TENSOR(values, *args, **options)
        if device is None or torch.device(device).type == "cpu":
            return made
        self.fault("a blocking copy in torch.tensor")
        return torch.empty(made.shape, dtype=made.dtype, device=device)

    # --- indexing -------------------------------------------------------------------------------

    def _getitem(self, tensor: torch.Tensor, key: Any) -> torch.Tensor:
        view, index = self._indexed(tensor, key)
        found: torch.Tensor = _ATEN.index(view, index) if any_of(index) else view
        return found

    def _setitem(self, tensor: torch.Tensor, key: Any, value: Any) -> None:
        view, index = self._indexed(tensor, key)
        if any_of(index):
            if not torch.is_tensor(value):
                value = torch.full((), value, dtype=view.dtype, device=view.device)
            _ATEN.index_put_(view, index, value)
        elif torch.is_tensor(value):
            _ATEN.copy_(view, value)
        else:
            view.fill_(value)

    def _indexed(self, tensor: torch.Tensor, key: Any) -> tuple[torch.Tensor, list[Any]]:
        """A view of the tensor, and the index tensor of each of its dimensions."""
        keys = list(key) if isinstance(key, tuple) else [key]
        at = next((i for i, k in enumerate(keys) if k is Ellipsis), None)
        if at is not None:
            used = sum(k is not None and k is not Ellipsis for k in keys)
            keys[at : at + 1] = [slice(None)] * (tensor.dim() - used)
        index: list[Any] = []
        for k in keys:
            dim = len(index)
            if k is None:
                tensor = _ATEN.unsqueeze(tensor, dim)
                index.append(None)
            elif isinstance(k, int | np.integer):
                tensor = _ATEN.select(tensor, dim, int(k))
            elif isinstance(k, slice):
                if k != slice(None):
                    tensor = _ATEN.slice(tensor, dim, k.start, k.stop, k.step or 1)
                index.append(None)
            else:
                if not torch.is_tensor(k):
                    self.fault("an index by a list of the host")
                    k = torch.empty(np.shape(k), dtype=torch.int64, device=tensor.device)
                index.append(k)
        return tensor, index


class _Warnings(logging.Handler):
    """Notes warnings of the engine as faults."""

    def __init__(self, device: Device) -> None:
        super().__init__(logging.WARNING)
        self._device = device

    def emit(self, record: logging.LogRecord) -> None:
        self._device.faults.append(record.getMessage())


class _Stream:
    """A stream or an event of a device whose work is always done."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def wait_stream(self, other: _Stream) -> None: ...

    def record(self, stream: _Stream) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _Event(_Stream):
    """An event. ``reached`` is called when the host waits for it."""

    def __init__(self, reached: Callable[[], None]) -> None:
        self._reached = reached

    def synchronize(self) -> None:
        self._reached()

    def query(self) -> bool:
        self._reached()
        return True


class _Graph:
    def __init__(self, device: Device) -> None:
        self._device = device

    def replay(self) -> None:
        self._device.replays += 1


_ATEN = torch.ops.aten
_REAL_ITEM = torch.Tensor.item
_REAL_TENSOR = torch.tensor
_WAITS = {"allclose": torch.allclose, "equal": torch.equal}


def any_of(index: list[Any]) -> bool:
    """Whether a dimension is indexed by a tensor."""
    return any(one is not None for one in index)


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a method of tensors."""
    return lambda tensor, *args, **options: function(tensor, *args, **options)


def _computes(function: Any, inputs: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
    """Whether an operation launches a kernel. Views and tensors that are not filled need no
    launch."""
    if function._schema.is_mutable:
        return True
    if str(function).startswith(("aten.empty", "aten.new_empty")):
        return False
    seen = {id(t.untyped_storage()) for t in inputs}
    return any(id(t.untyped_storage()) not in seen for t in made)


def _short(name: str) -> str:
    return name.removeprefix("aten.").removesuffix(".default")


def _type(value: Any) -> type:
    """The type of a value. Fake weights have the type of plain tensors."""
    return torch.Tensor if isinstance(value, torch.Tensor) else type(value)


def _shapes(name: str, model: Any) -> tuple[dict[int, LayerShape], dict[int, AttentionOptions]]:
    """The shapes and attention options that the loader's probe finds in a forward."""
    config = model.config
    dim = config.head_dim
    layers = range(config.num_hidden_layers)
    return (
        {i: LayerShape(config.num_key_value_heads, dim, dim) for i in layers},
        {i: AttentionOptions(dim**-0.5, None, None) for i in layers},
    )


def _fetch(self: sampler.Drawn) -> sampler.Sampled:
    """The tokens of a text that repeats itself, because the device computes no tokens."""
    assert isinstance(self.on_host, sampler.OnHost)
    assert self.on_host.tokens.device.type == self.on_host.logprobs.device.type == "cpu"
    if self.answers is not None:
        parts = self.answers.numbers, *(self.answers.likely or ()), self.answers.scores
        assert {part.device.type for part in parts if part is not None} == {"cpu"}
    tokens: list[int] = (1 + self.rows.positions % PERIOD).tolist()
    values = [-1.0] * len(tokens)
    found = sampler.Sampled(tokens, values, np.array([tokens, values], dtype=np.float64))
    for row in self.rows.parameters.top_logprobs:
        found.top[row] = {tokens[row]: -1.0}
    return found


def _fetch_scores(self: sampler.Scores) -> tuple[list[float], list[dict[int, float]]]:
    """The log-probabilities of scored tokens, which are all -1."""
    assert self.likely is not None
    assert {tensor.device.type for tensor in (self.values, *self.likely)} == {"cpu"}
    return [-1.0] * len(self.tokens), [{token: -1.0} for token in self.tokens]


def _fetch_guessed(self: draft_model.Guessed) -> list[int]:
    """The tokens of a draft, which are all 1."""
    assert self.on_host.device.type == "cpu"
    return [1] * len(self.on_host)


@contextmanager
def fake_device() -> Iterator[Device]:
    """Replaces CUDA by the fake device while the block runs."""
    device = Device()
    try:
        with pytest.MonkeyPatch.context() as patches, FakeTensorMode(allow_non_fake_inputs=True):
            device.patch(patches)
            with device:
                yield device
    finally:
        # torch caches the functions that a device context applies to. If a patched function stayed
        # in this cache, transformers would load later models with uninitialized buffers.
        _device._device_constructors.cache_clear()


def llama_8b(layers: int, parts: int = 1) -> Any:
    """A model of the shape of Llama 3 8B with ``layers`` layers, in bfloat16 on the device.
    ``parts``: the number of ranks that share the heads and the MLP. The model is the part of one
    rank."""
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14336 // parts,
        num_hidden_layers=layers,
        num_attention_heads=32 // parts,
        head_dim=128,
        num_key_value_heads=8 // parts,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        dtype="bfloat16",
    )
    with pytest.MonkeyPatch.context() as patches:
        # Random weights would need a random generator of the device.
        patches.setattr(torch.nn.Linear, "reset_parameters", lambda self: None)
        patches.setattr(torch.nn.Embedding, "reset_parameters", lambda self: None)
        patches.setattr(transformers.PreTrainedModel, "post_init", lambda self: None)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("cuda"):
                model = transformers.LlamaForCausalLM(config).eval()
        finally:
            torch.set_default_dtype(torch.float32)
    model.generation_config.eos_token_id = None
    return model
