"""A well-behaved stream next to a hostile one. It must receive the tokens that it receives
alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tokenbus.clients import Client

from .....processes import until

PROMPT = "def add(a, b):"
TOKENS = 600


class Neighbour:
    """Runs streams with a well-behaved controller or without a controller, one after another,
    during a block of a test.

    with neighbour.running():
        ...
    """

    def __init__(self, client: Client, controller: str | None = None) -> None:
        self._client, self._controller = client, controller
        with client.generate(PROMPT, **self._options()) as stream:
            self._wanted = stream.tokens()
        assert len(self._wanted) == TOKENS
        self.received = 0
        """Number of tokens that all streams have received."""
        self._failure: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Runs streams, which receive tokens before the block and again after it. Fails if the
        tokens differ from those of a stream that runs alone."""
        enough = threading.Event()
        thread = threading.Thread(target=self._run, args=(enough,))
        self._failure = None
        thread.start()
        try:
            self.wait_for_tokens()
            yield
            self.wait_for_tokens()
        finally:
            enough.set()
            thread.join()
        assert self._failure is None, self._failure

    def wait_for_tokens(self, count: int = 2) -> None:
        """Waits for this many more tokens. All but the first are computed after the call."""
        seen = self.received
        until(
            lambda: self.received >= seen + count or self._failure is not None,
            120.0,
            "the neighbour receives tokens",
        )
        assert self._failure is None, self._failure

    def _run(self, enough: threading.Event) -> None:
        try:
            while not enough.is_set():
                with self._client.generate(PROMPT, **self._options()) as stream:
                    for _ in stream:
                        self.received += 1
                        if enough.is_set():
                            break
                    [sequence] = stream.sequences
                    got = sequence.tokens
                    assert got == self._wanted[: len(got)], f"{got}, not {self._wanted}"
        except BaseException as failure:
            self._failure = failure

    def _options(self) -> dict[str, Any]:
        return {
            "controller": self._controller,
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "text": False,
        }
