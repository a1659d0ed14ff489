"""The forward of few tokens on a CPU in one call of native code (``native/decode.c``).

It computes what a ``FusedDecoder`` does, with the same weights and the same KV cache, and reads
keys and values from their blocks in place. The libraries are compiled when the package is built;
where there is none for this machine, or the model has something that it does not know, torch
computes all steps.
"""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Iterator
from ctypes import CDLL, POINTER, Structure, c_float, c_int64, c_void_p, pointer
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import gelu, silu

from .fused import Function, FusedDecoder, Layer, RmsNorm
from .huge_pages import collapse
from .kv_cache import KVCache
from .packing import Packed
from .projections import Projection

log = logging.getLogger(__name__)

MOST_TOKENS = 32
"""Forwards of more tokens are bound by arithmetic alone, which oneDNN does as well."""
MOST_SEQUENCES = 16
"""With more, torch's attention over copies that lie together is faster where texts are long."""
FIRST_POSITIONS = 1024
"""Positions whose rotations are computed at first; they double as sequences grow."""
_ACTIVATIONS: tuple[Function, ...] = (silu, partial(gelu, approximate="tanh"))
"""Those that it knows, in the order of their numbers."""


class Unsupported(Exception):
    """The native code cannot compute this model; the message says why."""


@cache
def library() -> CDLL | None:
    """The native code for this machine; None where there is none."""
    machine = platform.machine()
    processor = _processor(machine)
    path = Path(__file__).parent / "native" / f"decode-{machine}-{processor}.so"
    if sys.platform != "linux" or not processor or not path.exists():
        return None
    try:
        found = CDLL(str(path))
    except OSError as error:
        log.warning("%s cannot be loaded, so that torch computes all steps: %s", path, error)
        return None
    found.decoder_forward.argtypes = [c_void_p, c_void_p]
    return found


def _processor(machine: str) -> str:
    """The kind of processor whose instructions this one has; empty where nothing is compiled for
    it."""
    if machine == "aarch64":
        return "generic"
    kinds = {"AVX2": "x86_64_v3", "AVX512": "x86_64_v4"}
    return kinds.get(torch.backends.cpu.get_cpu_capability(), "") if machine == "x86_64" else ""


def is_native(num_tokens: int, num_sequences: int) -> bool:
    """Whether a forward of so many tokens is for the native code, if there is any."""
    return num_tokens <= MOST_TOKENS and num_sequences <= MOST_SEQUENCES


# --- the structures of decode.c -------------------------------------------------------------------


class _Norm(Structure):
    _fields_ = [("gain", c_void_p), ("size", c_int64), ("eps", c_float)]


class _Product(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("out", c_int64), ("in_", c_int64)]


class _Layer(Structure):
    _fields_ = [
        *((f"{name}_norm", _Norm) for name in ("attention", "attended", "mlp", "done")),
        *((f"{name}_norm", _Norm) for name in ("query", "key")),
        *((name, _Product) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_int64) for name in ("heads", "kv_heads", "dim")),
        *((name, c_int64) for name in ("window", "rotation", "activation")),
        *((name, c_float) for name in ("scale", "softcap", "residual_scale")),
    ]


class _Decoder(Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        *((name, c_int64) for name in ("num_layers", "hidden", "block_size")),
        ("norm", _Norm),
        ("head", _Product),
    ]


class _Rotation(Structure):
    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("dim", c_int64), ("by_position", c_int64)]


class _Step(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_tokens", "num_rows", "threads")),
        *((name, c_void_p) for name in ("positions", "slots", "blocks", "rows")),
        ("rotations", POINTER(_Rotation)),
        *((name, c_void_p) for name in ("hidden", "logits")),
    ]


def _norm(norm: Function | None) -> _Norm:
    if norm is None:
        return _Norm(None, 0, 0.0)
    if not isinstance(norm, RmsNorm):
        raise Unsupported(f"its norm is a {type(norm).__name__}")
    return _Norm(_floats(norm.gain), len(norm.gain), norm.eps)


def _product(projection: Projection) -> _Product:
    out, width = projection.weight.shape
    bias = projection.bias
    return _Product(_floats(projection.weight), None if bias is None else _floats(bias), out, width)


def _floats(tensor: torch.Tensor) -> int:
    """The address of a tensor that the native code can read."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
        raise Unsupported(f"its weights are {tensor.dtype} on {tensor.device}")
    if not tensor.is_contiguous():
        raise Unsupported("its weights are stored by input")
    return tensor.data_ptr()


def _activation(function: Function) -> int:
    sample = torch.linspace(-8, 8, 128)
    wanted = function(sample)
    for number, known in enumerate(_ACTIVATIONS):
        if torch.allclose(known(sample), wanted, atol=1e-6):
            return number
    raise Unsupported("its activation is neither SiLU nor GELU by tanh")


def _layer(layer: Layer, kinds: list[str]) -> _Layer:
    """A layer but for its keys and values."""
    heads, options = layer.head_norms, layer.options
    dim = layer.qkv.weight.shape[0] // (layer.num_heads + 2 * layer.num_kv_heads)
    return _Layer(
        _norm(layer.before_attention),
        _norm(layer.after_attention),
        _norm(layer.before_mlp),
        _norm(layer.after_mlp),
        _norm(heads.query if heads is not None else None),
        _norm(heads.key if heads is not None else None),
        _product(layer.qkv),
        _product(layer.output),
        _product(layer.mlp.gate_up),
        _product(layer.mlp.down),
        None,
        None,
        layer.num_heads,
        layer.num_kv_heads,
        dim,
        options.sliding_window or 0,
        kinds.index(layer.rotation) if layer.rotation is not None else -1,
        _activation(layer.mlp.activation),
        dim**-0.5 if options.scaling is None else options.scaling,
        options.softcap or 0.0,
        layer.residual_scale,
    )


def check_supported(decoder: FusedDecoder) -> None:
    """Raises Unsupported where the native code cannot compute what a decoder does."""
    if library() is None:
        raise Unsupported("no native code was compiled for this machine")
    for layer in decoder.layers:
        _layer(layer, decoder.kinds)
    _norm(decoder.norm)
    _product(decoder.head)


# --- the forward ----------------------------------------------------------------------------------


class _Rotations:
    """Cosines and sines by position, computed as far as sequences have got."""

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder
        self._computed = 0
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.native: Any = (_Rotation * max(1, len(decoder.kinds)))()

    def reach(self, position: int, hidden: torch.Tensor) -> None:
        """Computes them up to a position."""
        if position < self._computed:
            return
        self._computed = max(FIRST_POSITIONS, 2 * self._computed, position + 1)
        self._compute(torch.arange(self._computed), hidden, by_position=True)

    def compute(self, positions: np.ndarray, hidden: torch.Tensor) -> None:
        """Computes those of the tokens of one step, where they do not depend on positions alone."""
        self._compute(torch.from_numpy(positions), hidden, by_position=False)

    def _compute(self, positions: torch.Tensor, hidden: torch.Tensor, by_position: bool) -> None:
        found = []
        for number, kind in enumerate(self._decoder.kinds):
            cos, sin = (t.contiguous() for t in self._decoder.rotation(hidden, positions, kind))
            found.append((cos, sin))
            dim = cos.shape[-1]
            self.native[number] = _Rotation(cos.data_ptr(), sin.data_ptr(), dim, by_position)
        self._tables = found


class NativeDecoder:
    """A decoder's forwards of at most ``MOST_TOKENS`` tokens. Raises Unsupported."""

    def __init__(self, decoder: FusedDecoder, cache: KVCache, block_size: int) -> None:
        check_supported(decoder)
        found = library()
        assert found is not None
        self._call = found.decoder_forward
        self._decoder = decoder
        self._cache = cache
        layers = [_layer(layer, decoder.kinds) for layer in decoder.layers]
        for layer, fused in zip(layers, decoder.layers, strict=True):
            keys, values = cache.layers[fused.index]
            layer.keys, layer.values = _floats(keys), _floats(values)
        self._layers = (_Layer * len(layers))(*layers)
        self._vocab, hidden = decoder.head.weight.shape
        self._native = _Decoder(
            self._layers,
            len(layers),
            hidden,
            block_size,
            _norm(decoder.norm),
            _product(decoder.head),
        )
        self._rotations = _Rotations(decoder)
        collapse(_weights(decoder))

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor, packed: Packed, threads: int) -> torch.Tensor:
        """The logits ``[rows, vocab]`` of a step whose tokens have these ``ids``."""
        decoder, positions = self._decoder, packed.positions
        hidden = decoder.embedded(ids).contiguous()
        if decoder.by_position:
            self._rotations.reach(int(positions.max()), hidden)
        else:
            self._rotations.compute(positions, hidden)
        logits = hidden.new_empty(len(packed.rows), self._vocab)
        blocks = np.empty(len(positions), dtype=np.uint64)
        kept = list(_fill(blocks, packed))
        step = _Step(
            len(positions),
            len(packed.rows),
            threads,
            _address(positions),
            _address(packed.slot_mapping),
            _address(blocks),
            _address(packed.rows),
            self._rotations.native,
            hidden.data_ptr(),
            logits.data_ptr(),
        )
        if self._call(pointer(self._native), pointer(step)):
            raise MemoryError(f"no memory for a forward of {len(positions)} tokens")
        del kept
        return decoder.scaled(logits)


def _weights(decoder: FusedDecoder) -> Iterator[torch.Tensor]:
    """The matrices that a forward reads from one end to the other."""
    yield decoder.head.weight
    for layer in decoder.layers:
        products = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
        yield from (product.weight for product in products)


def _fill(addresses: np.ndarray, packed: Packed) -> Iterator[np.ndarray]:
    """Fills in where the blocks of each token's sequence lie, and yields the arrays that have them.

    They must be kept as long as the addresses are used.
    """
    for group in packed.groups:
        blocks = np.ascontiguousarray(group.blocks, dtype=np.int64)
        size = blocks.nbytes // group.batch
        places = group.places
        owners = np.arange(group.batch) if places is None else places // group.width
        addresses[group.start : group.end] = _address(blocks) + owners * size
        yield blocks


def _address(array: np.ndarray) -> int:
    """Where the entries of a contiguous array lie."""
    found: int = array.__array_interface__["data"][0]
    return found
