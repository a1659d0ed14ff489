"""Checks the prompt and the sampling parameters of a request, and makes the request's first
sequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import replace
from itertools import count

from ....protocol.errors import Code, RequestError
from ....protocol.sampling import Sampling
from ..model.loader import LoadedModel
from ..sampling.biases import bias_of_request
from ..sampling.min_tokens import Least
from .block_manager import BlockTable
from .seeds import derived_seed
from .sequence import Continued, PromptUsage, Sequence
from .stop_strings import StopStrings
from .text import Detokenizer, TextStream, detokenizers


class Intake:
    """Checks the requests for one model, and makes their sequences. Numbers the sequences in order
    of arrival.

    ``max_length``: maximum number of tokens of a sequence, including its prompt.
    """

    def __init__(self, loaded: LoadedModel, max_length: int) -> None:
        self._loaded = loaded
        self._max_length = max_length
        self._arrivals = count()
        self._detokenizer: Callable[[Tokens[int]], Detokenizer] | None = None
        if loaded.tokenizer is not None:
            self._detokenizer = detokenizers(loaded.tokenizer)

    def generation(
        self,
        request: int,
        prompt: Tokens[int],
        sampling: Sampling,
        *,
        priority: int,
        client: int,
        text: bool,
        inspect: bool,
        healed: int | None = None,
        adapter: int = 0,
    ) -> Sequence:
        """The first sequence of a generation. If ``sampling.n`` is above 1,
        ``LiveSequences.fork_pending`` later forks the other sequences from it.

        ``healed``: the token that was removed from the end of the prompt. Raises RequestError if
        the request cannot be run.
        """
        self.check_prompt(prompt)
        self.check_tokens(sampling.logit_bias, "$.logit_bias")
        strings = [s for s in sampling.stop if isinstance(s, str)]
        ids = frozenset(s for s in sampling.stop if isinstance(s, int))
        self.check_tokens(ids, "$.stop")
        if self._detokenizer is None and (text or strings):
            raise RequestError(
                Code.UNSUPPORTED,
                "this model has no tokenizer, so it cannot return text or stop at a string",
                path="$.text" if text else "$.stop",
            )
        _check_numbers(sampling)
        # As in vLLM, ``min_tokens`` also excludes end-of-sequence tokens if ``ignore_eos`` is set.
        # A request with a controller always has ``ignore_eos`` here, because the controller itself
        # ends a sequence at these tokens.
        ends = ids | self._loaded.eos_token_ids
        if not sampling.ignore_eos:
            ids = ends
        sequence = Sequence(
            request=request,
            seq=0,
            tokens=list(prompt),
            num_prompt=len(prompt),
            sampling=sampling,
            max_length=self._longest(prompt, sampling),
            seed=derived_seed(request) if sampling.seed is None else sampling.seed,
            priority=priority,
            client=client,
            arrival=next(self._arrivals),
            stop_ids=ids,
            least=self._least(sampling, ends),
            logit_bias=bias_of_request(sampling.logit_bias),
            with_text=text,
            inspect=inspect,
            prompt_usage=PromptUsage(len(prompt) + (healed is not None)),
            block_table=BlockTable(adapter=adapter),
            pending_forks=sampling.n - 1,
        )
        if healed is not None:
            sequence.healed = len(self.text_after(prompt, healed))
        if text or strings:
            sequence.text = self.text_of(sequence)
        return sequence

    def scoring(
        self,
        request: int,
        prompt: Tokens[int],
        scored: Tokens[int],
        *,
        priority: int,
        client: int,
        text: bool,
        top_logprobs: int,
        num_scored: int = 0,
        adapter: int = 0,
    ) -> Sequence:
        """The sequence of a score. Another worker has scored the first ``num_scored`` tokens of
        ``scored``. Raises RequestError if the request cannot be run."""
        length = len(prompt) + len(scored)
        self._check_prompt(prompt, length)
        if not scored:
            raise RequestError(
                Code.INVALID_FIELD,
                "'scored' is empty; a SCORE needs at least one token to score",
                path="$.scored",
            )
        self.check_tokens(scored, "$.scored")
        sequence = Sequence(
            request=request,
            seq=0,
            tokens=[*prompt, *scored],
            num_prompt=len(prompt),
            sampling=Sampling(top_logprobs=top_logprobs),
            max_length=length,
            scored=True,
            scored_from=len(prompt) + num_scored,
            priority=priority,
            client=client,
            arrival=next(self._arrivals),
            prompt_usage=PromptUsage(len(prompt)),
            block_table=BlockTable(adapter=adapter),
        )
        if text and self._detokenizer is not None:
            sequence.text = TextStream(self._detokenizer(prompt))
            for token in scored[:num_scored]:
                sequence.text.push(token)
        return sequence

    def begin_anew(self, sequence: Sequence, prompt: Tokens[int]) -> None:
        """Replaces all tokens of a sequence by a new prompt."""
        sequence.tokens, sequence.num_prompt = list(prompt), len(prompt)
        sequence.max_length = self._longest(prompt, sequence.sampling)
        sequence.counts, sequence.healed = None, 0
        sequence.num_drops += 1
        if sequence.text is not None:
            sequence.text = self.text_of(sequence)

    def _longest(self, prompt: Tokens[int], sampling: Sampling) -> int:
        """The maximum number of tokens of a sequence that begins with this prompt."""
        return min(self._max_length, len(prompt) + sampling.max_tokens)

    def continued(self, first: Sequence, begun: Continued) -> list[Sequence]:
        """The sequences of a generation that began at another worker. ``first``: the sequence that
        ``generation`` returned. Raises RequestError if a sequence is too long or has a token
        outside the vocabulary."""
        sequences = []
        for seq, tokens in begun.generated.items():
            prompt = begun.prompts.get(seq, first.tokens)
            longest = self._longest(prompt, first.sampling)
            if len(prompt) + len(tokens) >= longest:
                raise RequestError(
                    Code.PROMPT_TOO_LONG,
                    f"sequence {seq} cannot continue after {len(prompt) + len(tokens)} "
                    f"tokens; the sequences of this request end at {longest} tokens",
                    path="$.prompt",
                )
            self.check_tokens(prompt, "$.prompt")
            self.check_tokens(tokens, "$.prompt")
            sequence = replace(
                first,
                seq=seq,
                tokens=[*prompt, *tokens],
                num_prompt=len(prompt),
                max_length=longest,
                healed=0 if seq in begun.prompts else first.healed,
                block_table=BlockTable(adapter=first.block_table.adapter),
                continued=len(begun.generated) > 1,
                num_drops=begun.num_drops.get(seq, 0),
                pending_forks=0,
            )
            if first.text is not None:
                sequence.text = self.text_of(sequence)
            sequences.append(sequence)
        return sequences

    def text_after(self, prompt: Tokens[int], token: int) -> str:
        """The text of a token after a prompt. Empty if the token is special or ends inside a
        character, or if the model has no tokenizer."""
        if self._detokenizer is None:
            return ""
        detokenizer = self._detokenizer(prompt)
        text = detokenizer.push(token)
        return "" if detokenizer.finish() else text

    def text_of(self, sequence: Sequence) -> TextStream:
        """A text stream that has received a sequence's generated tokens."""
        assert self._detokenizer is not None
        if sequence.text is not None:
            stop = sequence.text.stop
        else:
            strings = [s for s in sequence.sampling.stop if isinstance(s, str)]
            stop = StopStrings(strings) if strings else None
        prompt = sequence.tokens[: sequence.num_prompt]
        least = sequence.sampling.min_tokens
        text = TextStream(self._detokenizer(prompt), stop, sequence.healed, least)
        for token in sequence.generated:
            text.push(token)
        return text

    def check_tokens(self, tokens: Iterable[int], path: str) -> None:
        """Raises RequestError for the first token id that is outside the model's vocabulary."""
        vocab_size = self._loaded.vocab_size
        for i, token in enumerate(tokens):
            if not 0 <= token < vocab_size:
                raise RequestError(
                    Code.TOKEN_OUT_OF_RANGE,
                    f"token id {token} is outside the vocabulary, which is 0 to {vocab_size - 1}",
                    path=f"{path}[{i}]",
                )

    def _least(self, sampling: Sampling, ends: Iterable[int]) -> Least | None:
        """Returns the minimum length of the request's sequences, or None if there is none.
        ``ends``: the tokens that would end the sequences."""
        known = sorted(token for token in ends if 0 <= token < self._loaded.vocab_size)
        return Least(sampling.min_tokens, known) if sampling.min_tokens and known else None

    def check_prompt(self, prompt: Tokens[int]) -> None:
        """Raises RequestError if the prompt is empty, has a token outside the vocabulary, or does
        not leave room for a generated token."""
        self._check_prompt(prompt, len(prompt) + 1)

    def _check_prompt(self, prompt: Tokens[int], length: int) -> None:
        path = "$.prompt"
        if not prompt:
            raise RequestError(
                Code.EMPTY_PROMPT, "the prompt is empty; it needs at least one token", path=path
            )
        if length > self._max_length:
            raise RequestError(
                Code.PROMPT_TOO_LONG,
                f"the request needs at least {length} tokens; "
                f"{self._loaded.name} takes at most {self._max_length}",
                path=path,
            )
        self.check_tokens(prompt, path)


def _check_numbers(sampling: Sampling) -> None:
    """Raises RequestError if ``min_tokens`` is above ``max_tokens``, or if a bias or a penalty is
    NaN."""
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            Code.INVALID_FIELD,
            f"min_tokens is {sampling.min_tokens}; expected at most max_tokens, which is "
            f"{sampling.max_tokens}",
            path="$.min_tokens",
        )
    added = {
        "logit_bias": [*sampling.logit_bias.values()],
        "presence_penalty": [sampling.presence_penalty],
        "frequency_penalty": [sampling.frequency_penalty],
    }
    for name, numbers in added.items():
        if any(map(math.isnan, numbers)):
            text = f"{name} has the value NaN; expected a number"
            raise RequestError(Code.INVALID_FIELD, text, path=f"$.{name}")
