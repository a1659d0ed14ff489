"""HTTP clients of the servers on which ``_programs_clients.py`` runs its algorithms: this project's
gateway and llama.cpp's server.

A client sends token ids and receives token ids, so that no text is tokenized twice. Connections
stay open and are used again. Requests and answers are as short as the interfaces allow.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tokenizers import Tokenizer

TEMPERATURE = 0.8


class Completed(NamedTuple):
    """A completion."""

    tokens: list[int]
    """The new tokens, without the line end if the completion was to end there."""
    logprobs: list[float]
    """The log-probability of each token, if requested."""
    top: dict[int, float]
    """The likeliest first tokens with their log-probabilities, if requested."""


class Wanted(NamedTuple):
    """A request for a completion."""

    tokens: int
    """Maximum number of tokens."""
    line: bool = False
    """Whether the completion ends before the first line end."""
    logprobs: bool = False
    top: int = 0
    """Number of likeliest first tokens to report."""
    choice: Sequence[str] = ()
    """The texts of which one is chosen; empty for any text."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema of the text."""


class Door(Protocol):
    """A server that completes prompts."""

    words: Words

    async def complete(self, prompt: list[int], wanted: Wanted) -> Completed: ...


class Words:
    """The tokenizer of the served model."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        [self.line_end] = self.tokens("\n")
        self._ids = {
            self._tokenizer.decode([number]): number
            for number in reversed(range(self._tokenizer.get_vocab_size()))
        }

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return str(self._tokenizer.decode(list(tokens)))

    def token(self, text: str) -> int:
        """The token with this text. Tokens that are not valid UTF-8 may have equal texts; the first
        of these tokens is returned."""
        return self._ids[text]

    def line(self, tokens: list[int]) -> list[int]:
        """The tokens before the first line end."""
        end = tokens.index(self.line_end) if self.line_end in tokens else len(tokens)
        return tokens[:end]


class Http:
    """An HTTP server, and the open connections to it that are not in use."""

    def __init__(self, address: str) -> None:
        self._host, port = address.split(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a JSON body. Raises RuntimeError if its status is not 200."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n"
        message = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        while True:
            fresh = not self._idle
            if fresh:
                reader, writer = await asyncio.open_connection(self._host, self._port)
            else:
                reader, writer = self._idle.pop()
            try:
                writer.write(message)
                answer = (await reader.readuntil(b"\r\n\r\n")).lower()
                break
            except (OSError, asyncio.IncompleteReadError):
                # The server has closed a connection that was not in use.
                writer.close()
                if fresh:
                    raise
        size = int(answer.partition(b"content-length:")[2].split(b"\r\n")[0])
        content = await reader.readexactly(size)
        if b"connection: close" in answer:
            writer.close()
        else:
            self._idle.append((reader, writer))
        if not answer.startswith(b"http/1.1 200"):
            raise RuntimeError(f"{path} was refused: {answer!r} {content[:2000]!r}")
        return json.loads(content)

    def close(self) -> None:
        """Closes the connections that are not in use."""
        for _, writer in self._idle:
            writer.close()


def _common_fields(prompt: list[int], wanted: Wanted) -> dict[str, Any]:
    """The fields that a request has at both servers."""
    stop = {"stop": ["\n"]} if wanted.line else {}
    return {"prompt": prompt, "temperature": TEMPERATURE, "ignore_eos": True, **stop}


class GatewayDoor:
    """``/v1/completions`` of this project's gateway."""

    def __init__(self, http: Http, model: str, words: Words) -> None:
        self._http = http
        self._model = model
        self.words = words

    async def complete(self, prompt: list[int], wanted: Wanted) -> Completed:
        """Completes a prompt."""
        body = _common_fields(prompt, wanted)
        body |= {"model": self._model, "max_tokens": wanted.tokens, "return_token_ids": True}
        if wanted.logprobs or wanted.top:
            body["logprobs"] = wanted.top
        if wanted.choice:
            body["structured_outputs"] = {"choice": list(wanted.choice)}
        if wanted.schema is not None:
            body["structured_outputs"] = {"json": wanted.schema}
        answer = await self._http.post("/v1/completions", body)
        [choice] = answer["choices"]
        tokens = choice["token_ids"]
        found = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": [{}]}
        top = found["top_logprobs"][0] if wanted.top else {}
        return Completed(
            self.words.line(tokens) if wanted.line else tokens,
            found["token_logprobs"],
            {self.words.token(text): logprob for text, logprob in top.items()},
        )


class LlamaDoor:
    """``/completion`` of llama.cpp's server. Unlike its OpenAI interface, it returns token ids. The
    server keeps the prompts of its slots."""

    def __init__(self, http: Http, words: Words) -> None:
        self._http = http
        self.words = words

    async def complete(self, prompt: list[int], wanted: Wanted) -> Completed:
        """Completes a prompt."""
        body = _common_fields(prompt, wanted)
        body |= {"n_predict": wanted.tokens, "samplers": ["temperature"]}
        body |= {"return_tokens": True, "cache_prompt": True}
        if wanted.logprobs or wanted.top:
            body["n_probs"] = max(1, wanted.top)
        if wanted.choice:
            body["grammar"] = "root ::= " + " | ".join(map(json.dumps, wanted.choice))
        if wanted.schema is not None:
            # This server cuts the JSON at the maximum. The gateway completes the JSON before.
            body |= {"json_schema": wanted.schema, "n_predict": max(64, wanted.tokens)}
        answer = await self._http.post("/completion", body)
        tokens, seen = answer["tokens"], answer.get("completion_probabilities", [])
        top = seen[0]["top_logprobs"] if wanted.top else []
        return Completed(
            self.words.line(tokens) if wanted.line else tokens,
            [one["logprob"] for one in seen],
            {one["id"]: one["logprob"] for one in top},
        )
