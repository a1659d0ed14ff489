"""The forward on a CPU. Native code computes all steps, only the steps of few tokens, or no steps.
Torch computes the other steps."""

from __future__ import annotations

import logging
import time

import numpy as np
import torch

from ...engine.packing import Packed
from ..backend import ForwardBackend
from ..fused.backend import FusedBackend
from ..kv_cache import Layout
from ..loader import FUSED_TOLERANCE, difference
from ..probes import Probes
from ..step_tensors import Context
from .decoder import NativeDecoder, Unsupported, is_native
from .threads import ThreadChooser

log = logging.getLogger(__name__)


class CpuBackend(ForwardBackend):
    """Runs all steps, or only the steps of few tokens, in native code. Runs the other steps by
    another backend.

    ``native``: the same model in native code; None if torch computes all steps. ``threads`` chooses
    the number of threads of each forward; None if all steps use all threads. ``why_not_exact``: the
    reason why torch computes the steps of many tokens; empty if native code computes all steps.
    """

    def __init__(
        self,
        base: ForwardBackend,
        native: NativeDecoder | None = None,
        threads: ThreadChooser | None = None,
        why_not_exact: str = "",
    ) -> None:
        super().__init__(base.tensors)
        self.why_no_graphs = base.why_no_graphs
        self.why_no_kernels = base.why_no_kernels
        self.why_not_exact = why_not_exact
        self.native = native
        self._base = base
        self._threads = threads

    def refresh(self) -> None:
        """Makes all copies of weights again, after the model's weights have been changed in
        place."""
        self._base.refresh()
        if self.native is not None:
            self.native.refresh()

    def compute(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: Context
    ) -> torch.Tensor:
        """The logits at ``rows``, by torch."""
        if self._threads is None:
            return self._base.compute(ids, positions, rows, context)
        torch.set_num_threads(self._threads.choose(len(ids)))
        began = time.perf_counter()
        try:
            return self._base.compute(ids, positions, rows, context)
        finally:
            self._threads.observe(len(ids), time.perf_counter() - began)
            torch.set_num_threads(self._threads.max_threads)

    def forward(self, packed: Packed, drawn: torch.Tensor | None = None) -> torch.Tensor:
        """The logits of ``packed.rows``."""
        num_sequences = sum([group.batch for group in packed.groups])
        if self.native is not None and self.reads_blocks(len(packed.ids), num_sequences):
            return self._natively(self.native, _known_ids(packed, drawn), packed)
        return super().forward(packed, drawn)

    def reads_blocks(self, num_tokens: int, num_sequences: int) -> bool:
        """Whether native code computes a step of this size."""
        if self.native is None:
            return False
        return not self.why_not_exact or is_native(num_tokens, num_sequences)

    def _natively(self, native: NativeDecoder, ids: np.ndarray, packed: Packed) -> torch.Tensor:
        if self._threads is None:
            return native.forward(ids, packed, torch.get_num_threads())
        threads = self._threads.choose(len(ids))
        began = time.perf_counter()
        logits = native.forward(ids, packed, threads)
        self._threads.observe(len(ids), time.perf_counter() - began)
        return logits


def native_decoder(
    name: str, plain: FusedBackend, layout: Layout
) -> tuple[NativeDecoder | None, str]:
    """Makes the native decoder of a model. Returns the decoder and a text. The decoder is None if
    the native code does not support the model, or if its logits differ from torch's; the text then
    has the reason. If there is a decoder, the text is the reason why its logits may depend on the
    batch; empty if they do not."""
    probes = Probes(plain.tensors, layout)
    try:
        native = NativeDecoder(plain.decoder, plain.tensors.cache, layout.block_size)
        packed = probes.prompt()
        found = native.forward(packed.ids, packed, 1)
        wanted = probes.logits(plain, packed)
        probes.clear()
        distance = difference(found, wanted)
        if not distance <= FUSED_TOLERANCE:
            raise Unsupported(f"its logits would differ by {distance:.3g} standard deviations")
    except Unsupported as why:
        log.info("%s: torch computes all of its steps: %s", name, why)
        return None, f"torch computes its steps: {why}"
    if not plain.decoder.by_position:
        return native, "its rotary embeddings depend on the longest text of a step"
    return native, ""


def _known_ids(packed: Packed, drawn: torch.Tensor | None) -> np.ndarray:
    """The ids of a forward, including the drawn tokens, which are in host memory on a CPU."""
    if drawn is None or packed.fed is None:
        return packed.ids
    tokens = drawn.numpy()
    ids = packed.ids.copy()
    ids[packed.fed] = tokens if packed.drawn is None else tokens[packed.drawn]
    return ids
