"""The sequences that are sampled together, with the sampling inputs that are the same in each
step."""

from __future__ import annotations

from itertools import compress, count
from operator import contains

import msgspec
import numpy as np

from ....protocol.sampling import Override, Sampling
from ..engine.packing import ints
from ..engine.sequence import Sequence
from .distributions import TokenOptions
from .min_tokens import MinTokens
from .row_parameters import RowParameters, Rows


class SampledBatch:
    """The sequences of a step, one for each row. If consecutive steps have the same sequences, and
    no sequence drops tokens, the steps share one object."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.parameters = RowParameters(
            [(s.sampling, s.draw_seed, s.seq) for s in sequences],
            MinTokens.of([s.least for s in sequences]),
            {i: s.logit_bias for i, s in enumerate(sequences) if s.logit_bias is not None},
        )
        self.num_prompt = ints(s.num_prompt for s in sequences)
        self._others = [i for i, s in enumerate(sequences) if not s.gives_columns]
        self.with_text = [i for i, s in enumerate(sequences) if s.text is not None]
        """The rows whose tokens are decoded to text."""
        self._inspected = [i for i, s in enumerate(sequences) if s.inspect]
        self._stop_ids = [s.stop_ids for s in sequences]
        self._limits = ints(s.max_length - s.num_prompt for s in sequences)

    def rows(self, positions: np.ndarray | None) -> Rows:
        """The inputs of sampling the next token of each sequence. ``positions``: if this step's
        forward computes exactly the last token of each sequence, the positions of these tokens. If
        not, None."""
        sequences = self.sequences
        if positions is None:
            generated = ints(s.num_generated for s in sequences)
        else:
            generated = positions + 1 - self.num_prompt
        options = {i: s.options for i, s in enumerate(sequences) if s.options is not None}
        return Rows(
            self._overridden(options) if options else self.parameters,
            generated,
            {i: s.mask for i, s in enumerate(sequences) if s.mask is not None},
            {i: s.bias for i, s in enumerate(sequences) if s.bias is not None},
            {i: sequences[i].count_tokens() for i in self.parameters.penalised},
            self._inspected,
            options,
        )

    def _overridden(self, options: dict[int, TokenOptions]) -> RowParameters:
        """The parameters of this step, with the overrides of controllers."""
        overrides = {i: o.override for i, o in options.items() if o.override is not None}
        if not overrides:
            return self.parameters
        return RowParameters(
            [
                _with_override(s.sampling, s.draw_seed, s.seq, overrides.get(i))
                for i, s in enumerate(self.sequences)
            ],
            self.parameters.min_tokens,
            self.parameters.biases,
        )

    def others(self, rows: Rows, tokens: list[int]) -> list[int]:
        """The rows whose tokens are not plain in this step (``TokenColumns``). A token is not plain
        if it is the first or the last token of its sequence, or if it has more fields than columns
        contain."""
        positions = rows.positions
        others = np.flatnonzero((positions == 0) | (positions + 1 >= self._limits)).tolist()
        stops = compress(count(), map(contains, self._stop_ids, tokens))
        return [*self._others, *others, *stops]


def _with_override(
    sampling: Sampling, seed: int, seq: int, override: Override | None
) -> tuple[Sampling, int, int]:
    """The sampling parameters, seed and sequence number of a row, after a controller's
    overrides."""
    if override is None:
        return sampling, seed, seq
    temperature, top_p = override.temperature, override.top_p
    sampling = msgspec.structs.replace(
        sampling,
        temperature=sampling.temperature if temperature is None else temperature,
        top_p=sampling.top_p if top_p is None else top_p,
    )
    return sampling, seed if override.seed is None else override.seed, seq
