"""Records a stream in a file, runs it again, and compares the entries.

    client.generate("def add(a, b):", record="add.json").wait()
    recording = read_recording("add.json")
    difference = first_difference(recording.entries, again(client, recording))

A recording contains the entries of a stream, the request with its buffers and seed, and the model's
fingerprint. It contains the controller's module only if the program gave the module to a
``Recorder``. Another machine can run the recording again.
"""

from __future__ import annotations

import os
import platform
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET, Struct

from ..protocol.bodies import unpack_tokens
from ..protocol.columns import Row, plain_entry
from ..protocol.decoders import json_decoder
from ..protocol.errors import Code, ConnectionLostError, RequestError, TokenbusError
from ..protocol.expected_values import plain
from ..protocol.messages import PROTOCOL_VERSION, Generate, ModelInfo, Token
from ..protocol.sampling import MAX_TOP_LOGPROBS
from .calls import Call
from .results import Sequences

if TYPE_CHECKING:
    from .client import Client
    from .request_options import Prompt

FORMAT = 1
_OWN = {"stream_id", "prompt", "buffers", "save", "trace", "request_id"}
"""Fields of a request that a replay does not copy. The replay passes the prompt and the buffers
separately."""


class RecordedBuffer(Struct, kw_only=True, omit_defaults=True):
    """A buffer of the prompt: its text, or its token ids."""

    name: str
    text: str | None = None
    tokens: list[int] | None = None


class Recording(Struct, kw_only=True, omit_defaults=True):
    """The recording of a stream: the request, its buffers, the model, the controller's module, and
    the entries."""

    format: int
    tokenbus: str
    """The version of Tokenbus that made the recording."""
    protocol: int
    machine: str
    """Processor and operating system of the client that made the recording."""
    request: Generate
    """The request with its seed; ``prompt`` is the text or the token ids."""
    buffers: list[RecordedBuffer] = []
    model: ModelInfo | None = None
    """The model of the stream; None if the client did not receive the model's properties."""
    module: bytes | None = None
    """The Wasm module of the controller, if the module was given to the ``Recorder``."""
    complete: bool = False
    """Whether the stream was read to its end."""
    error: str = ""
    code: str = ""
    """The error message of the stream and its code; both are empty without an error."""
    entries: list[Token] = []

    @property
    def failure(self) -> str:
        """The error of the stream. If the stream has no error, the first error of a sequence. Empty
        if no sequence has an error either."""
        return self.error or next((e.error for e in self.entries if e.error), "")


class Recorder(Sequences):
    """Writes a stream to a file when the stream finishes, fails or is closed.

    Pass a Recorder as ``generate(record=…)`` to add the controller's module to the recording, or to
    record only failures.
    """

    def __init__(
        self, file: str | Path, module: bytes | None = None, *, only_failures: bool = False
    ) -> None:
        """``module``: the Wasm module of the controller. ``only_failures``: the file is written
        only if the stream or one of its sequences ends with an error."""
        super().__init__()
        self._file = Path(file)
        self._module = module
        self._only_failures = only_failures
        self._recorded: list[Token | Row] = []
        self._recording: Recording | None = None
        self.served_by: Callable[[], ModelInfo | None] | None = None
        """Returns the stream's model, or None if the model is not known yet. Only AsyncClient sets
        this function. AsyncClient sends the request before the answer to MODEL_INFO has arrived."""
        rows, received = self.add_row, self._recorded

        def add_row(row: Row) -> None:
            received.append(row)
            rows(row)

        self.add_row = add_row

    def begin(self, call: Call, model: ModelInfo | None, buffers: Mapping[str, Prompt]) -> None:
        """Stores the request, and adds a seed if it is missing. Called before the request is sent.
        Raises RequestError if this client has not sent a buffer of the request."""
        message = call.message
        assert isinstance(message, Generate)
        if message.seed is None:
            message.seed = secrets.randbits(63)
        prompt = message.prompt
        if prompt is None and call.attachments:
            prompt = unpack_tokens(call.attachments[0])
        self._recording = Recording(
            format=FORMAT,
            tokenbus=_version(),
            protocol=PROTOCOL_VERSION,
            machine=f"{platform.machine()} {platform.system()}",
            request=msgspec.structs.replace(message, prompt=prompt),
            buffers=[_buffer(name, buffers) for name in message.buffers],
            model=model,
            module=self._module,
        )

    def add(self, entry: Token) -> None:
        """Adds one entry."""
        self._recorded.append(entry)
        super().add(entry)

    def ended(self, error: TokenbusError | None, complete: bool) -> None:
        """Writes the file. If the connection was lost before the first entry, the file is left
        unchanged, because it may contain an earlier recording."""
        recording, self._recording = self._recording, None
        unanswered = isinstance(error, ConnectionLostError) and not self._recorded
        if recording is None or unanswered:
            return
        recording.complete = complete
        recording.entries = [
            entry if isinstance(entry, Token) else plain_entry(*entry) for entry in self._recorded
        ]
        if error is not None:
            recording.error, recording.code = error.message, str(error.code)
        if self._only_failures and not recording.failure:
            return
        if recording.model is None and self.served_by is not None:
            recording.model = self.served_by()
        _write(self._file, recording)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two streams."""

    seq: int
    at: int
    """The index of the entry in the sequence, from 0."""
    recorded: Token | None
    """The entry of the recorded sequence; None if this sequence has no entry at this index."""
    replayed: Token | None

    def __str__(self) -> str:
        return (
            f"entry {self.at} of sequence {self.seq} differs: recorded {_shown(self.recorded)}, "
            f"now {_shown(self.replayed)}"
        )


def read_recording(file: str | Path) -> Recording:
    """Reads the recording in a file. Raises RequestError if the recording is not valid, and OSError
    if the file cannot be read."""
    try:
        recording = json_decoder(Recording).decode(Path(file).read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            Code.INVALID_FIELD, f"{file} is not a recording: {plain(str(error))}"
        ) from None
    if recording.format != FORMAT:
        raise RequestError(
            Code.INVALID_FIELD,
            f"{file} has the format {recording.format} of Tokenbus {recording.tokenbus}; this "
            f"version of Tokenbus reads the format {FORMAT}",
        )
    return recording


def again(
    client: Client,
    recording: Recording,
    *,
    module: bytes | None = None,
    until: int | None = None,
    inspect: bool = False,
    model: str | None = None,
) -> Iterator[Token]:
    """Runs the recorded request again; yields at most ``until`` entries.

    ``module``: a controller to run instead of the recorded controller. ``inspect``: whether entries
    have the effect of their masks, and the ``MAX_TOP_LOGPROBS`` most likely tokens. ``model``: the
    present name of the model, if it is not the recorded name.

    Raises the errors of the stream. Raises RequestError if the model has a different tokenizer or
    samples different tokens for the same seed.
    """
    request = recording.request
    named = request.model if model is None else model
    if recording.model is not None:
        here = client.model_info(named)
        if here.fingerprint != recording.model.fingerprint:
            raise RequestError(
                Code.INVALID_FIELD,
                f"the model {here.name} has the tokenizer {here.fingerprint[:12]}; the recording "
                f"needs the tokenizer {recording.model.fingerprint[:12]} of {recording.model.name}",
                path="$.model",
            )
        if request.temperature > 0 and here.sampling != recording.model.sampling:
            raise RequestError(
                Code.INVALID_FIELD,
                f"the recorded tokens were sampled by version {recording.model.sampling}; the "
                f"worker samples by version {here.sampling}, which gives other tokens for the same "
                "seed: record the stream again",
                path="$.temperature",
            )
    fields = msgspec.structs.asdict(request)
    defaults = msgspec.structs.asdict(Generate(stream_id=0))
    options: dict[str, Any] = {
        name: value
        for name, value in fields.items()
        if name not in _OWN and value != defaults[name] and value is not UNSET
    }
    options.update(model=named, text=request.text)
    if inspect:
        options |= {"inspect": True, "top_logprobs": MAX_TOP_LOGPROBS}
    wasm = module if module is not None else recording.module
    if wasm is not None:
        options["controller"] = client.upload_controller(wasm).module
    names = []
    try:
        for number, buffer in enumerate(recording.buffers):
            name = f"replay-{secrets.token_hex(4)}-{number}"
            client.buffer(name, buffer.tokens or buffer.text or [])
            names.append(name)
        prompt = request.prompt if request.prompt is not None else []
        with client.generate(prompt, buffers=names, **options) as stream:
            yield from islice(stream, until)
    finally:
        for name in names:
            with suppress(TokenbusError):
                client.drop_buffer(name)


def first_difference(
    recorded: Iterable[Token], replayed: Iterable[Token], prefix: bool = False
) -> Difference | None:
    """The first difference between two streams. The first difference is the one that comes first in
    ``recorded``. None if the streams are equal. ``prefix``: if true, a sequence may have more
    entries in one of the streams.

    Texts, messages, log-probabilities and times are not compared.
    """
    received: dict[int, list[Token]] = {}
    for entry in replayed:
        received.setdefault(entry.seq, []).append(entry)
    counts: dict[int, int] = {}
    for entry in recorded:
        at = counts.get(entry.seq, 0)
        counts[entry.seq] = at + 1
        others = received.get(entry.seq, [])
        other = others[at] if at < len(others) else None
        if other is None and prefix:
            continue
        if other is None or _compared(entry) != _compared(other):
            return Difference(entry.seq, at, entry, other)
    if not prefix:
        for seq, others in sorted(received.items()):
            at = counts.get(seq, 0)
            if at < len(others):
                return Difference(seq, at, None, others[at])
    return None


# --- private --------------------------------------------------------------------------------------


def _compared(entry: Token) -> tuple[object, ...]:
    return (
        *(entry.token, entry.pos, entry.parent, entry.backtrack, entry.logs, entry.storage),
        *(entry.finish_reason, entry.error, entry.code, entry.stop, entry.constraint),
    )


def _shown(entry: Token | None) -> str:
    if entry is None:
        return "nothing"
    parts = []
    if entry.parent is not None:
        parts.append(f"a fork of sequence {entry.parent} at {entry.pos}")
    if entry.backtrack:
        parts.append(f"{entry.backtrack} tokens dropped")
    if entry.token is not None:
        text = "" if entry.text is UNSET else f" {entry.text!r}"
        chance = "appended" if entry.logprob is None else f"logprob {entry.logprob:.4f}"
        parts.append(f"token {entry.token}{text} at {entry.pos} ({chance})")
    if entry.logs:
        parts.append(f"log {entry.logs[:80]!r}")
    if entry.storage:
        parts.append(f"{len(entry.storage)} writes to variables")
    if entry.finish_reason is not None:
        why = f": {entry.error}" if entry.error else ""
        parts.append(f"the end ({entry.finish_reason}{why})")
    return ", ".join(parts) or "an entry without a token"


def _buffer(name: str, buffers: Mapping[str, Prompt]) -> RecordedBuffer:
    if name not in buffers:
        raise RequestError(
            Code.INVALID_FIELD,
            f"the buffer {name!r} cannot be recorded, because this client has not sent it; send it "
            "with the buffer() method of this client",
            path="$.buffers",
        )
    content = buffers[name]
    if isinstance(content, str):
        return RecordedBuffer(name=name, text=content)
    return RecordedBuffer(name=name, tokens=list(content))


def _write(file: Path, recording: Recording) -> None:
    """Replaces the file atomically."""
    data = msgspec.json.format(msgspec.json.encode(recording), indent=1)
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(descriptor, "wb") as out:
            out.write(data + b"\n")
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _version() -> str:
    # The import is slow, and most clients do not record.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tokenbus")
    except PackageNotFoundError:
        return "of a source tree"
