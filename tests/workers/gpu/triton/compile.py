"""Compiles the Triton kernels for a GPU, on a machine without one, and prints a line of JSON for
each kernel.

``python -m tests.workers.gpu.triton.compile CAPABILITY DTYPE``: 90 is an H100, 80 an A100.
``launch`` calls the operations of ``ops`` on a CPU. A stand-in for each kernel receives the
arguments of the launch, and compiles the kernel for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from tokenbus.workers.gpu.model.triton import attention_kernels, layer_kernels, ops
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DIMS = (64, 96, 128, 256)
OPTIONS = ("num_warps", "num_stages")


class Recorder:
    """Replaces a kernel. ``kernel[grid](...)`` compiles the kernel for ``target``."""

    def __init__(self, kernel: Any, target: GPUTarget) -> None:
        self._kernel = kernel
        self._target = target

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._compile

    def _compile(self, *args: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        names = self._kernel.arg_names
        given = {**dict(zip(names, args, strict=False)), **named}
        fixed = {p.name for p in self._kernel.params if p.do_not_specialize}
        constants = {p.name for p in self._kernel.params if p.is_constexpr}
        # An integer argument of 1 is a constant, unless the kernel does not specialize it.
        ones = {n for n, v in given.items() if type(v) is int and v == 1 and n not in fixed}
        signature = {
            name: "constexpr" if name in constants | ones else _type(given[name]) for name in names
        }
        values = {(names.index(n),): given[n] for n in names if signature[n] == "constexpr"}
        aligned = {
            (names.index(n),): [["tt.divisibility", 16]]
            for n in names
            if n not in fixed and signature[n] != "constexpr" and _is_aligned(given[n])
        }
        source = ASTSource(self._kernel, signature, values, aligned)
        compiled = triton.compile(source, target=self._target, options=options)
        found = {
            "kernel": self._kernel.__name__,
            "dim": given.get("DIM", 0),
            "shared": compiled.metadata.shared,
            "spilled": _stack(compiled.asm["cubin"]),
            "asynchronous": compiled.asm["ptx"].count("cp.async.cg"),
            "products": sum(compiled.asm["ptx"].count(f"{name}.") for name in ("mma", "wgmma")),
        }
        print(json.dumps(found), flush=True)


def _type(value: Any) -> str:
    if torch.is_tensor(value):
        return (
            "*"
            + {
                torch.bfloat16: "bf16",
                torch.float16: "fp16",
                torch.float32: "fp32",
                torch.int32: "i32",
                torch.int64: "i64",
            }[value.dtype]
        )
    return "fp32" if isinstance(value, float) else "i32"


def _is_aligned(value: Any) -> bool:
    return torch.is_tensor(value) or (isinstance(value, int) and value % 16 == 0)


def _stack(cubin: bytes) -> int:
    """Bytes of a thread's stack, to which registers were spilled."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(text.split("STACK:")[1].split()[0])


@contextmanager
def recorded(target: GPUTarget) -> Iterator[None]:
    """Makes launches compile the kernels while the block runs."""
    kernels = {
        (module, name): getattr(module, name)
        for module, names in (
            (attention_kernels, ("split_kernel", "prefill_kernel")),
            (layer_kernels, ("norm_kernel", "gated_kernel", "rotary_kernel")),
        )
        for name in names
    }
    for (module, name), kernel in kernels.items():
        setattr(module, name, Recorder(kernel, target))
    try:
        yield
    finally:
        for (module, name), kernel in kernels.items():
            setattr(module, name, kernel)


def launch(dtype: torch.dtype) -> None:
    """Launches the attention and rotary kernels once for each head size, and the other kernels
    once, with the shapes of an 8B model."""
    ints = torch.zeros(2, dtype=torch.int32)
    for dim in DIMS:
        cache = [torch.zeros(2, 64, 8, dim, dtype=dtype) for _ in range(2)]
        heads = torch.zeros(1, 48, dim, dtype=dtype)
        query = heads[:, :32]
        chunks = [torch.zeros(1, 3, dtype=torch.int32), ints, ints[:1], ints[:1].view(1, 1)]
        partials = [torch.zeros(1, 8, ops.MAX_SPLITS, 4, last) for last in (dim, 2)]
        numbers = (0.1, 0, 0.0)
        ops.split_attention(query, query, cache, chunks, [*partials, ints], 4, *numbers)
        ops.prefill_attention(query, query, cache, chunks, *numbers)
        turns = [torch.zeros(1, 1, dim, dtype=dtype) for _ in range(2)]
        ops.rotary_store(heads, turns, torch.zeros(1, dtype=torch.int64), cache, [], [])
    hidden = torch.zeros(1, 4096, dtype=dtype)
    ops.norm(hidden, hidden, hidden, hidden[0], 1e-5, 1.0, None, 0.0)
    ops.gated(torch.zeros(1, 14336, dtype=dtype), torch.zeros(1, 28672, dtype=dtype), False)


if __name__ == "__main__":
    with recorded(GPUTarget("cuda", int(sys.argv[1]), 32)):
        launch(getattr(torch, sys.argv[2]))
