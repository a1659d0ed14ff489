"""Stop strings are found, and text is held back, as by a comparison with every prefix of every stop
string. The work for a token does not depend on the stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import example, given
from hypothesis import strategies as st
from tokenbus.protocol.sampling import MAX_STOP, MAX_STOP_CHARS, Sampling
from tokenbus.workers.gpu.engine.intake import Intake
from tokenbus.workers.gpu.engine.sequence import Continued
from tokenbus.workers.gpu.engine.stop_strings import StopStrings
from tokenbus.workers.gpu.engine.text import ByteDetokenizer, ByteTable, TextStream
from tokenbus.workers.gpu.model.loader import load_model

from ...work import num_calls

PIECES = ["", "a", "b", "c", "ab", "ba", "aab", "bbaa", "abcab", "é"]
TABLE = ByteTable.of([piece.encode() for piece in PIECES])


@dataclass
class Compared:
    """The text of a sequence by comparison with every prefix of every stop string."""

    stop: Sequence[str]
    skip: int
    early: int
    held: str = ""

    def push(self, token: int) -> tuple[str, str]:
        if self.early:
            self.early -= 1
        new = PIECES[token][self.skip :]
        self.skip -= min(self.skip, len(PIECES[token]))
        before, held = len(self.held), self.held + new
        found = [
            (at, stop)
            for stop in (() if self.early else self.stop)
            if (at := held.find(stop, max(0, before + 1 - len(stop)))) >= 0
        ]
        if found:
            self.held = ""
            at, stop = min(found)
            return held[:at], stop
        keep = max(
            length
            for stop in self.stop
            for length in range(min(len(held) + 1, len(stop)))
            if held.endswith(stop[:length])
        )
        self.held = held[len(held) - keep :]
        return held[: len(held) - keep], ""


TOKENS = st.lists(st.integers(0, len(PIECES) - 1), max_size=20)
STOP = st.lists(st.text("abcé", min_size=1, max_size=7), min_size=1, max_size=5)


@given(STOP, TOKENS, TOKENS, TOKENS, st.integers(0, 4), st.integers(0, 6))
@example(["ab", "aba", "b"], [], [1, 5, 2], [4, 1], 0, 2)
def test_a_sequence_and_its_fork_have_the_text_of_a_comparison(
    stop: list[str],
    tokens: list[int],
    own: list[int],
    forked: list[int],
    skip: int,
    min_tokens: int,
) -> None:
    """The text continues after a stop string, as in a request whose controller does not stop."""
    stream = TextStream(ByteDetokenizer(TABLE), StopStrings(stop), skip, min_tokens)
    reference = Compared(stop, skip, 1 + min_tokens if min_tokens else 0)
    for token in tokens:
        assert stream.push(token) == reference.push(token)
    fork, expected = stream.fork(), replace(reference)
    for one, other, rest in ((stream, reference, own), (fork, expected, forked)):
        for token in rest:
            assert one.push(token) == other.push(token)
        assert one.finish() == (other.held, "")
        assert one.finish() == ("", "")


def long_stop_strings() -> list[str]:
    """As many and as long stop strings as a request can have. A text of ``a`` begins the first,
    and a text of ``ba`` returns to shorter beginnings."""
    size = MAX_STOP_CHARS - 1
    strings = ["a" * size + "é"]
    return strings + ["b" + "a" * (size - k) + "é" for k in range(MAX_STOP - 1)]


def test_long_stop_strings_cost_no_more_per_token_than_a_short_one() -> None:
    text = [1] * (2 * MAX_STOP_CHARS) + [2, *[1] * MAX_STOP_CHARS] * 2

    def work(stop: Sequence[str]) -> int:
        stream = TextStream(ByteDetokenizer(TABLE), StopStrings(stop))
        return num_calls(lambda: [stream.push(token) for token in text], builtin=True)

    assert work(long_stop_strings()) < 10 * work(["é"])


def test_the_strings_of_a_request_are_prepared_once_for_all_its_sequences() -> None:
    strings = StopStrings(long_stop_strings())
    stream = TextStream(ByteDetokenizer(TABLE), strings)
    for token in [1] * MAX_STOP_CHARS:
        stream.push(token)
    fork = stream.fork()
    again = TextStream(ByteDetokenizer(TABLE), strings)
    first = num_calls(lambda: fork.push(1), builtin=True)
    assert first < 30
    rest = num_calls(lambda: [again.push(1) for _ in range(MAX_STOP_CHARS)], builtin=True)
    assert rest < 20 * MAX_STOP_CHARS


def test_creating_stop_strings_does_not_build_their_states() -> None:
    strings = long_stop_strings()
    assert num_calls(lambda: StopStrings(strings), builtin=True) < 10 * len(strings)


def test_resumed_and_restarted_sequences_share_the_stop_strings_of_their_request() -> None:
    intake = Intake(load_model("embedded"), 200)
    sampling = Sampling(stop=["ab", "b"], max_tokens=9)
    first = intake.generation(1, [5, 6], sampling, priority=0, client=0, text=True, inspect=False)
    assert first.text is not None
    shared = first.text.stop
    resumed = intake.continued(first, Continued({0: [7], 1: [8]}, made=2))
    intake.begin_anew(first, [9])
    assert shared is not None
    assert all(s.text is not None and s.text.stop is shared for s in [first, *resumed])
