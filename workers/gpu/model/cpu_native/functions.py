"""Replaces operations of a transformers model by operations of the native forward, on a CPU.

With these operations, a trainer can compute a whole text in one forward. The log-probabilities have
the same bits as those of an exact stream, if trainer and worker use the same instruction set. The
functions have no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, c_float, c_int64, c_void_p
from typing import Any

import torch

from ..fused.decoder import RmsNorm
from ..fused.from_transformers import IGNORED, fused_norm
from ..transformers.attention import register
from .decoder import Unsupported, activation_number
from .library import library

NAME = "tokenbus_exact"
"""The name of the attention in transformers."""


@contextmanager
def exact_functions(model: Any) -> Iterator[None]:
    """A context in which ``model`` computes one text ``[1, num_tokens]`` as native code does.

    Raises Unsupported if the machine has no native code or the model has an unknown part.
    """
    native = _declared()
    changed = [(module, _replacement(native, module, name)) for name, module in _modules(model)]
    before = model.config._attn_implementation
    register(NAME, _attention_of(native))
    model.set_attn_implementation(NAME)
    for module, function in changed:
        module.forward = function
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, _ in changed:
            del module.forward
        model.set_attn_implementation(before)


def _declared() -> CDLL:
    """Declares the types of the native functions, and returns the library."""
    native = library()
    if native is None:
        raise Unsupported("no native code was compiled for this machine")
    pointers = [c_void_p] * 5
    native.function_product.argtypes = [*pointers, c_int64]
    native.function_norm.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float]
    native.function_activate.argtypes = [c_int64, c_void_p, c_int64]
    native.function_attention.argtypes = [*pointers, c_float, c_float, c_int64]
    return native


def _modules(model: Any) -> Iterator[tuple[str, Any]]:
    """The products, norms and activations of a model, each with the last part of its name."""
    for path, module in model.named_modules():
        name = path.rpartition(".")[2]
        if (
            isinstance(module, torch.nn.Linear)
            or "norm" in name
            or name in ("act_fn", "activation_fn")
        ):
            yield name, module


def _replacement(native: CDLL, module: Any, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The native function of a module."""
    if isinstance(module, torch.nn.Linear):
        return _product_of(native, module)
    if name in IGNORED:
        return _activation_of(native, activation_number(module))
    norm = fused_norm(module)
    if not isinstance(norm, RmsNorm):
        raise Unsupported(f"its norm is a {type(module).__name__}")
    return _norm_of(native, norm)


def _product_of(native: CDLL, layer: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
    weight, bias = layer.weight, layer.bias

    def product(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = x.new_empty(*x.shape[:-1], len(weight))
        sizes = torch.tensor([x.shape[:-1].numel(), *weight.shape])
        found = None if bias is None else bias.data_ptr()
        native.function_product(
            weight.data_ptr(),
            found,
            x.data_ptr(),
            y.data_ptr(),
            sizes.data_ptr(),
            torch.get_num_threads(),
        )
        return y

    return product


def _norm_of(native: CDLL, norm: RmsNorm) -> Callable[[torch.Tensor], torch.Tensor]:
    size = len(norm.gain)

    def normalized(x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        rows = x.shape[:-1].numel()
        native.function_norm(norm.gain.data_ptr(), x.data_ptr(), y.data_ptr(), rows, size, norm.eps)
        return y

    return normalized


def _activation_of(native: CDLL, number: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def activated(x: torch.Tensor) -> torch.Tensor:
        y = x.clone(memory_format=torch.contiguous_format)
        native.function_activate(number, y.data_ptr(), y.numel())
        return y

    return activated


def _attention_of(native: CDLL) -> Callable[..., tuple[torch.Tensor, None]]:
    """The attention function of transformers' interface, for one text."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        batch, heads, tokens, dim = query.shape
        if batch != 1 or key.shape[2] != tokens:
            raise ValueError(f"exact attention needs one whole text; the batch has {batch} texts")
        q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))
        y = torch.empty_like(q)
        sizes = torch.tensor([tokens, heads, key.shape[1], dim, sliding_window or 0])
        scale = dim**-0.5 if scaling is None else scaling
        pointers = [t.data_ptr() for t in (q, k, v, y, sizes)]
        threads = torch.get_num_threads()
        if native.function_attention(*pointers, scale, softcap or 0.0, threads):
            raise MemoryError(f"no memory for the attention of {tokens} tokens")
        return y.unsqueeze(0), None

    return attention
