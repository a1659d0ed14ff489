"""A moved stream of a program that sends messages: its client receives each message once."""

from __future__ import annotations

from typing import Any

from tokenbus.protocol.messages import Token
from tokenbus.workers.gpu.serving.resumption import resume


def entry(token: int | None = None, logprob: float | None = None, **more: Any) -> Token:
    return Token(token=token, stream_id=1, logprob=logprob, finish_reason=None, **more)


def test_messages_since_the_last_sampled_token_are_not_sent_again() -> None:
    entries = [
        entry(7, messages=["old"]),
        entry(8, -1.0),
        entry(messages=["a"]),
        entry(9, messages=["b"]),
    ]
    [one] = resume(entries, steered=True).live
    assert (one.tokens, one.given.messages) == ([7, 8], 2)
    assert one.given.take_messages(["a"]) == []
    assert one.given.take_messages(["b", "c"]) == ["c"]


def test_an_entry_with_only_messages_is_not_one_that_the_controller_repeats() -> None:
    """The replay may send both messages with one entry."""
    entries = [entry(8, -1.0), entry(messages=["a"]), entry(9), entry(messages=["b"])]
    [one] = resume(entries, steered=True).live
    assert one.given.entries == 1
