"""The forward of a decoder on a CPU in one call of native code (``decode.c``).

The native code computes the results of a ``FusedDecoder``, from the same weights and the same KV
cache. It reads keys and values from their blocks in place. The libraries are compiled when the
package is built. If this machine has no library, or the native code does not support a part of the
model, torch computes all steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p, pointer
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import gelu, silu

from ...engine.packing import Packed
from ..fused.decoder import Function, FusedDecoder, Layer, RmsNorm
from ..fused.projections import Projection
from ..kv_cache import KVCache
from .huge_pages import collapse
from .library import address, library

MAX_TOKENS = 32
"""Maximum number of tokens of a native forward, if torch computes larger forwards. In larger
forwards, arithmetic takes most of the time, and oneDNN computes as fast as native code."""
MAX_SEQUENCES = 16
"""Maximum number of sequences of a native forward, if torch computes larger forwards. With more
sequences of long texts, torch's attention over contiguous copies is faster."""
NO_EMBEDDING = -2
"""The result of ``decoder_forward`` if an id has no embedding."""
EMBEDDINGS_COMPARED = 64
"""Number of embeddings that are compared with the input of the model's first layer."""
FIRST_POSITIONS = 1024
"""Initial number of positions for which rotations are computed. The number doubles when a sequence
becomes longer."""
_ACTIVATIONS: tuple[Function, ...] = (silu, partial(gelu, approximate="tanh"))
"""The activations that the native code supports; an activation's index is its number in the native
code."""


class Unsupported(Exception):
    """The native code cannot compute this model; the message says why."""


def is_native(num_tokens: int, num_sequences: int) -> bool:
    """Whether a forward of this size is small enough for native code, if torch computes larger
    forwards."""
    return num_tokens <= MAX_TOKENS and num_sequences <= MAX_SEQUENCES


# --- the structures of decoder.h ------------------------------------------------------------------


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
        ("num_embeddings", c_int64),
        ("embeddings", c_void_p),
        ("embedding_scale", c_float),
        ("norm", _Norm),
        ("head", _Product),
        *((name, c_float) for name in ("logits_scale", "logits_cap")),
    ]


class _Rotation(Structure):
    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("dim", c_int64), ("by_position", c_int64)]


class _Step(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_tokens", "num_rows", "threads")),
        *((name, c_void_p) for name in ("ids", "positions", "slots", "blocks", "rows")),
        ("rotations", POINTER(_Rotation)),
        ("logits", c_void_p),
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


@torch.inference_mode()
def _embeddings(decoder: FusedDecoder) -> tuple[int, int, float]:
    """The number of a decoder's embeddings, their address, and the factor by which the model
    multiplies them."""
    weight = getattr(decoder.embed, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        raise Unsupported("its embedding weights are not a matrix")
    found = _floats(weight)
    ids = torch.arange(min(len(weight), EMBEDDINGS_COMPARED))
    plain, given = weight[ids], decoder.embedded(ids)
    most = plain.abs().argmax()
    scale = (given.flatten()[most] / plain.flatten()[most]).item() if plain.any() else 1.0
    if given.dtype != plain.dtype or not torch.allclose(plain * scale, given):
        raise Unsupported("the input of its first layer is not its embeddings times a number")
    return len(weight), found, scale


def _floats(tensor: torch.Tensor) -> int:
    """The address of a tensor. Raises Unsupported if the native code cannot read the tensor."""
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
        raise Unsupported(f"its weights are {tensor.dtype} on {tensor.device}")
    if not tensor.is_contiguous():
        raise Unsupported("its weights are not contiguous")
    return tensor.data_ptr()


def activation_number(function: Function) -> int:
    """The number of an activation in the native code. Raises Unsupported."""
    sample = torch.linspace(-8, 8, 128)
    wanted = function(sample)
    for number, known in enumerate(_ACTIVATIONS):
        if torch.allclose(known(sample), wanted, atol=1e-6):
            return number
    raise Unsupported("its activation is neither SiLU nor GELU by tanh")


def _layer(layer: Layer, kinds: list[str]) -> _Layer:
    """The native structure of a layer, without the addresses of its keys and values. ``kinds``: the
    names of the rotary embeddings, in the order of their numbers in the native code."""
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
        activation_number(layer.mlp.activation),
        dim**-0.5 if options.scaling is None else options.scaling,
        options.softcap or 0.0,
        layer.residual_scale,
    )


def check_supported(decoder: FusedDecoder) -> None:
    """Raises Unsupported if the native code cannot compute this decoder."""
    if library() is None:
        raise Unsupported("no native code was compiled for this machine")
    for layer in decoder.layers:
        _layer(layer, decoder.kinds)
    _norm(decoder.norm)
    _product(decoder.head)
    _embeddings(decoder)


# --- the forward ----------------------------------------------------------------------------------


class _Rotations:
    """Cosines and sines by position, computed up to the length of the longest sequence so far."""

    def __init__(self, decoder: FusedDecoder) -> None:
        self._decoder = decoder
        self._hidden = torch.empty(1, decoder.head.weight.shape[1])
        """A buffer that has the dtype and device of the weights."""
        self._computed = 0
        self._tables: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.native: Any = (_Rotation * max(1, len(decoder.kinds)))()

    def reach(self, end: int) -> None:
        """Computes cosines and sines for all positions before ``end``."""
        if end <= self._computed:
            return
        self._computed = max(FIRST_POSITIONS, 2 * self._computed, end)
        self._compute(torch.arange(self._computed), by_position=True)

    def compute(self, positions: np.ndarray) -> None:
        """Computes the cosines and sines of the tokens of one step. Called in each step if cosines
        and sines depend on more than the position."""
        self._compute(torch.from_numpy(positions), by_position=False)

    @torch.inference_mode()
    def _compute(self, positions: torch.Tensor, by_position: bool) -> None:
        found = []
        for number, kind in enumerate(self._decoder.kinds):
            rotation = self._decoder.rotation(self._hidden, positions, kind)
            cos, sin = (t.contiguous() for t in rotation)
            found.append((cos, sin))
            dim = cos.shape[-1]
            self.native[number] = _Rotation(cos.data_ptr(), sin.data_ptr(), dim, by_position)
        self._tables = found


class NativeDecoder:
    """Computes the forwards of a decoder in native code. The constructor raises Unsupported."""

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
        native = _Decoder(
            self._layers,
            len(layers),
            hidden,
            block_size,
            *_embeddings(decoder),
            _norm(decoder.norm),
            _product(decoder.head),
            decoder.logits_scale,
            decoder.logits_cap or 0.0,
        )
        self._native = pointer(native)
        self._rotations = _Rotations(decoder)
        collapse(_weights(decoder))

    def refresh(self) -> None:
        """Measures the scale of the embeddings again, after the weights have been changed in place.
        The native code reads all other values of the weights where torch stores them."""
        _, _, self._native.contents.embedding_scale = _embeddings(self._decoder)

    def forward(self, ids: np.ndarray, packed: Packed, threads: int) -> torch.Tensor:
        """The logits ``[rows, vocab]`` of a step. ``ids``: ids of the packed tokens, int64."""
        positions, count = packed.positions, len(packed.rows)
        if self._decoder.by_position:
            self._rotations.reach(max([group.length for group in packed.groups]))
        else:
            self._rotations.compute(positions)
        logits = np.empty((count, self._vocab), dtype=np.float32)
        blocks = np.empty(len(positions), dtype=np.uint64)
        kept = list(_fill(blocks, packed))
        step = _Step(
            len(positions),
            count,
            threads,
            address(ids),
            address(positions),
            address(packed.slot_mapping),
            address(blocks),
            address(packed.rows),
            self._rotations.native,
            address(logits),
        )
        failed = self._call(self._native, byref(step))
        if failed == NO_EMBEDDING:
            raise IndexError(f"one of the tokens {ids.tolist()} is outside the vocabulary")
        if failed:
            raise MemoryError(f"no memory for a forward of {len(positions)} tokens")
        del kept
        return torch.from_numpy(logits)


def _weights(decoder: FusedDecoder) -> Iterator[torch.Tensor]:
    """The matrices that a forward reads completely."""
    yield decoder.head.weight
    for layer in decoder.layers:
        products = (layer.qkv, layer.output, layer.mlp.gate_up, layer.mlp.down)
        yield from (product.weight for product in products)


def _fill(addresses: np.ndarray, packed: Packed) -> Iterator[np.ndarray]:
    """For each token, writes the address of its sequence's block numbers to ``addresses``. Yields
    the arrays of block numbers. The caller must keep these arrays while the addresses are used."""
    for group in packed.groups:
        blocks = np.ascontiguousarray(group.blocks, dtype=np.int64)
        size = blocks.nbytes // group.batch
        places = group.places
        owners = np.arange(group.batch) if places is None else places // group.width
        addresses[group.start : group.end] = address(blocks) + owners * size
        yield blocks
