"""Log-probabilities of minus infinity, which JSON cannot represent, are -9999 in all answers."""

from __future__ import annotations

from math import inf, nan
from types import SimpleNamespace
from typing import Any

from tokenbus.clients.gateway.openai.logprobs import (
    Sampled,
    completion_logprobs,
    reported,
    token_logprobs,
)
from tokenbus.clients.gateway.openai.prompt_logprobs import _place
from tokenbus.clients.gateway.sglang.answers import Reports
from tokenbus.clients.results import GeneratedSequence
from tokenbus.protocol.messages import Token

LEAST = -9999.0
SEQUENCE = GeneratedSequence(
    0,
    tokens=[5, 6],
    logprobs=[-inf, nan],
    top_logprobs=[{5: -inf, 7: -1.0}, {}],
    _pieces=["a", "b"],
)


class Model:
    """A model in which the text of each token is its token id in decimal."""

    def text_of(self, token: int) -> str:
        return str(token)

    def bytes_of(self, token: int) -> bytes:
        return str(token).encode()


MODEL: Any = Model()


def test_the_logprobs_of_openai_are_bounded() -> None:
    tops = {5: -inf, 7: -1.0}
    entry = Token(token=5, stream_id=1, logprob=-inf, finish_reason=None, top_logprobs=tops)
    streamed = Sampled.of_entry(entry, "a")
    for sampled in (Sampled.of(SEQUENCE), streamed):
        completion = completion_logprobs(MODEL, sampled, 2)
        assert completion.token_logprobs[0] == LEAST
        assert completion.top_logprobs[0] == {"7": -1.0, "5": LEAST}
        chat, *_ = token_logprobs(MODEL, sampled, 2)
        alternatives = [each.logprob for each in chat.top_logprobs]
        assert [chat.logprob, *alternatives] == [LEAST, -1.0, LEAST]
    assert reported([-inf, nan, -2.0]) == [LEAST, None, -2.0]


def test_the_logprobs_of_a_prompt_are_bounded() -> None:
    found = _place(MODEL, 1, 5, -inf, {7: -inf})
    assert [each.logprob for each in found.values()] == [LEAST, LEAST]


def test_the_logprobs_of_sglang_are_bounded() -> None:
    meta: Any = SimpleNamespace()
    Reports(MODEL, True, 2, False, False, False).add_to(meta, SEQUENCE)
    assert [each[0] for each in meta.output_token_logprobs] == [LEAST, None]
    assert [each[0] for each in meta.output_top_logprobs[0]] == [-1.0, LEAST]
