"""A client in a separate process, which may run on another machine. It begins streams and reports
their outcomes.

The process reads commands, one JSON object in each line, and answers each command with a line:

``{"do": "begin", "streams": {NAME: OPTIONS}}`` begins streams, and answers when each has an entry.
``{"do": "submit", "streams": {NAME: OPTIONS}}`` begins streams, and answers at once.
``{"do": "end", "streams": NAMES}`` waits for the ends of streams, and answers with their outcomes.
``{"do": "upload", "tag": TAG, "wasm": HEX}`` uploads a controller.
``{"do": "workers"}`` answers with the role and the models of each registered worker.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from tokenbus.clients import Client, Stream, TokenbusError
from tokenbus.clients import System as Notice


class Streams:
    """The streams that were begun, and the notices about each of them."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._begun: dict[str, tuple[Stream, list[Notice]]] = {}

    def submit(self, streams: dict[str, dict[str, Any]]) -> list[str]:
        """Begins streams, each with its name as its prompt."""
        for name, options in streams.items():
            notices: list[Notice] = []
            stream = self._client.generate(name, on_system=notices.append, **options)
            self._begun[name] = stream, notices
        return list(streams)

    def begin(self, streams: dict[str, dict[str, Any]]) -> list[str]:
        """Begins streams, and waits for the first entry of each."""
        for name in self.submit(streams):
            next(iter(self._begun[name][0]))
        return list(streams)

    def end(self, names: list[str]) -> dict[str, Any]:
        """Waits for the ends of the named streams; returns their outcomes."""
        return {name: dict(_outcome(*self._begun.pop(name))) for name in names}


def _outcome(stream: Stream, notices: list[Notice]) -> Iterator[tuple[str, Any]]:
    try:
        sequences = stream.wait()
    except TokenbusError as error:
        yield "error", f"{error.code}: {error}"
    else:
        yield (
            "sequences",
            [[s.seq, s.tokens, s.logs, s.storage, s.finish_reason, s.error] for s in sequences],
        )
    yield "notices", [notice.event for notice in notices]


def main() -> None:
    """Executes commands until the input ends."""
    with Client() as client:
        streams = Streams(client)
        for line in sys.stdin:
            match json.loads(line):
                case {"do": "begin", "streams": given}:
                    answer: Any = streams.begin(given)
                case {"do": "submit", "streams": given}:
                    answer = streams.submit(given)
                case {"do": "end", "streams": names}:
                    answer = streams.end(names)
                case {"do": "upload", "tag": tag, "wasm": wasm}:
                    answer = client.upload_controller(bytes.fromhex(wasm), tag).module
                case {"do": "workers"}:
                    answer = [[w.role, w.models] for w in client.status(timeout_s=60.0).workers]
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
