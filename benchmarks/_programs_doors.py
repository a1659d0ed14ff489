"""HTTP clients, with which ``_programs_clients.py`` runs its algorithms. The servers are this
project's gateway and llama.cpp's server.

``SdkDoor`` uses the ``openai`` package and sends strings. The other clients are written for speed:
they send and receive token ids, and write the bytes of the requests themselves. All clients use
their connections for several requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from openai import AsyncOpenAI
from tokenizers import Tokenizer

TEMPERATURE = 0.8

Text = TypeVar("Text", list[int], str)
"""The type of a client's texts: token ids or a string."""


class Completed(NamedTuple, Generic[Text]):
    """A completion."""

    text: Text
    """The generated text. If ``Wanted.line`` is set, the text does not include the line end."""
    logprobs: list[float]
    """The log-probability of each generated token, if the request asks for log-probabilities."""
    top: list[tuple[Text, float]]
    """The most likely first tokens with their log-probabilities, if the request asks for them."""


class Wanted(NamedTuple):
    """A request for a completion."""

    tokens: int
    """Maximum number of tokens."""
    line: bool = False
    """Whether the completion ends before the first line end."""
    logprobs: bool = False
    top: int = 0
    """Number of most likely first tokens that the server reports."""
    choice: Sequence[str] = ()
    """The texts from which the model chooses; empty if any text is allowed."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema that the text must match; None if any text is allowed."""


class Coding(Protocol[Text]):
    """Converts between strings and the texts of a client."""

    def encode(self, text: str) -> Text: ...

    def decode(self, text: Text) -> str: ...


class Door(Protocol[Text]):
    """A client of a server that completes prompts."""

    @property
    def words(self) -> Coding[Text]: ...

    async def complete(self, prompt: Text, wanted: Wanted) -> Completed[Text]: ...


class Strings:
    """The coding of a client that stores strings."""

    def encode(self, text: str) -> str:
        """Returns the string unchanged."""
        return text

    def decode(self, text: str) -> str:
        """Returns the string unchanged."""
        return text


class Words:
    """The tokenizer of the served model."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        [self._line_end] = self.encode("\n")
        self._ids = {
            self._tokenizer.decode([number]): number
            for number in reversed(range(self._tokenizer.get_vocab_size()))
        }

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, text: list[int]) -> str:
        """The string that the tokens represent."""
        return str(self._tokenizer.decode(text))

    def token(self, text: str) -> int:
        """The first token with this text. Tokens that are not valid UTF-8 may have equal texts."""
        return self._ids[text]

    def line(self, tokens: list[int]) -> list[int]:
        """The tokens before the first line end; all tokens if the text has one line."""
        end = tokens.index(self._line_end) if self._line_end in tokens else len(tokens)
        return tokens[:end]


class Http:
    """An HTTP server, and the open connections to it that are not in use."""

    def __init__(self, address: str) -> None:
        self._host, port = address.split(":")
        self._port = int(port)
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Sends a JSON body and returns the decoded answer. Raises RuntimeError if the answer's
        status is not 200."""
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
    """The fields that requests to both servers have."""
    stop = {"stop": ["\n"]} if wanted.line else {}
    return {"prompt": prompt, "temperature": TEMPERATURE, "ignore_eos": True, **stop}


def _structured_outputs(wanted: Wanted) -> dict[str, Any]:
    """The constraint of a request to the gateway."""
    if wanted.choice:
        return {"structured_outputs": {"choice": list(wanted.choice)}}
    if wanted.schema is not None:
        return {"structured_outputs": {"json": wanted.schema}}
    return {}


class SdkDoor:
    """``/v1/completions`` of this project's gateway, through OpenAI's client. Prompts are strings,
    as in most users' programs. The gateway tokenizes each prompt."""

    def __init__(self, address: str, model: str) -> None:
        self._client = AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none")
        self._model = model
        self.words = Strings()

    async def complete(self, prompt: str, wanted: Wanted) -> Completed[str]:
        """Completes a prompt."""
        answer = await self._client.completions.create(
            model=self._model,
            prompt=prompt,
            max_tokens=wanted.tokens,
            temperature=TEMPERATURE,
            stop="\n" if wanted.line else None,
            logprobs=wanted.top if wanted.logprobs or wanted.top else None,
            extra_body={"ignore_eos": True, **_structured_outputs(wanted)},
        )
        [choice] = answer.choices
        found = choice.logprobs
        logprobs = (found and found.token_logprobs) or []
        top = (wanted.top and found and found.top_logprobs) or [{}]
        return Completed(choice.text, logprobs, [*top[0].items()])


class GatewayDoor:
    """``/v1/completions`` of this project's gateway."""

    def __init__(self, http: Http, model: str, words: Words) -> None:
        self._http = http
        self._model = model
        self.words = words

    async def complete(self, prompt: list[int], wanted: Wanted) -> Completed[list[int]]:
        """Completes a prompt."""
        body = _common_fields(prompt, wanted)
        body |= {"model": self._model, "max_tokens": wanted.tokens, "return_token_ids": True}
        body |= _structured_outputs(wanted)
        if wanted.logprobs or wanted.top:
            body["logprobs"] = wanted.top
        answer = await self._http.post("/v1/completions", body)
        [choice] = answer["choices"]
        tokens = choice["token_ids"]
        found = choice["logprobs"] or {"token_logprobs": [], "top_logprobs": [{}]}
        top = found["top_logprobs"][0] if wanted.top else {}
        return Completed(
            self.words.line(tokens) if wanted.line else tokens,
            found["token_logprobs"],
            [([self.words.token(text)], logprob) for text, logprob in top.items()],
        )


class LlamaDoor:
    """``/completion`` of llama.cpp's server. Unlike the server's OpenAI interface, ``/completion``
    returns token ids. The server caches the last prompt of each slot."""

    def __init__(self, http: Http, words: Words) -> None:
        self._http = http
        self.words = words

    async def complete(self, prompt: list[int], wanted: Wanted) -> Completed[list[int]]:
        """Completes a prompt."""
        body = _common_fields(prompt, wanted)
        body |= {"n_predict": wanted.tokens, "samplers": ["temperature"]}
        body |= {"return_tokens": True, "cache_prompt": True}
        if wanted.logprobs or wanted.top:
            body["n_probs"] = max(1, wanted.top)
        if wanted.choice:
            body["grammar"] = "root ::= " + " | ".join(map(json.dumps, wanted.choice))
        if wanted.schema is not None:
            # This server truncates the JSON at the maximum number of tokens. The gateway closes
            # the JSON before the maximum.
            body |= {"json_schema": wanted.schema, "n_predict": max(160, wanted.tokens)}
        if wanted.choice or wanted.schema is not None:
            # After a constrained text, the server accepts only the end-of-sequence token.
            body["ignore_eos"] = False
        answer = await self._http.post("/completion", body)
        while wanted.top and "completion_probabilities" not in answer:
            # The sampled token is only a part of a character. The server does not report the
            # log-probabilities of such tokens, so the request is sent again.
            answer = await self._http.post("/completion", body)
        tokens, seen = answer["tokens"], answer.get("completion_probabilities", [])
        if answer["stop_type"] == "eos":
            tokens.pop()
        top = seen[0]["top_logprobs"] if wanted.top else []
        return Completed(
            self.words.line(tokens) if wanted.line else tokens,
            [one["logprob"] for one in seen],
            [([one["id"]], one["logprob"]) for one in top],
        )
