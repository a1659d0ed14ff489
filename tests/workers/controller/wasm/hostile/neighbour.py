"""A well-behaved stream beside a hostile one: it must have its tokens all the same."""

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
    """Streams with a well-behaved controller, one after another while a test wants one.

    with neighbour.running():
        ...
    """

    def __init__(self, client: Client, controller: str | None = None) -> None:
        self._client, self._controller = client, controller
        with client.generate(PROMPT, **self._options()) as stream:
            self._wanted = stream.tokens()
        assert len(self._wanted) == TOKENS
        self.received = 0
        """Tokens, of all of its streams."""
        self._failure: BaseException | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """A stream that has begun before the block and goes on after it, with the same tokens."""
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
        """Until this many more tokens have come; all but the first were computed from now on."""
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
