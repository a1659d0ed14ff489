"""The options of a client's methods, and the functions that convert the options to calls. A call is
one request of the client (``calls.py``)."""

from __future__ import annotations

import difflib
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from ..protocol.bodies import pack_tokens
from ..protocol.decoders import convert
from ..protocol.errors import Code, RequestError
from ..protocol.messages import (
    Buffer,
    Delete,
    DrainWorker,
    Embed,
    Generate,
    ModelInfoRequest,
    ModelTokenizerRequest,
    Msg,
    PauseMode,
    PauseModel,
    Pooling,
    ResumeModel,
    Rollout,
    Score,
    SendWeights,
    StatusRequest,
    StoredModule,
    System,
    Tag,
    Tags,
    UpdateMode,
    UpdateWeights,
    Upload,
    module_too_large,
)
from ..protocol.scripts import language_of, marked_script
from .calls import Call
from .tracing import identify
from .weights_content import WeightsContent

Prompt = str | Sequence[int]
"""Text, which the worker tokenizes, or token ids."""
OnSystem = Callable[[System], None]

RETRY_S = 30.0
"""The default of ``retry_s``, in seconds."""
DRAIN_S = 600.0
"""The default of ``timeout_s`` for the calls of ``Operator``, in seconds. Workers may have to
finish their streams, or to read weights."""
ASK_S = 30.0
"""The default of ``timeout_s`` for calls with a short answer, such as ``model_info`` and
``status``, in seconds."""
UPLOAD_S = 120.0
"""The default of ``timeout_s`` for ``upload_controller``, in seconds. A large module takes long to
compile."""
STORE_RETRY_S = 10.0
"""If no worker is available for a request to the module store, the client sends it again for this
number of seconds."""


class RequestOptions(TypedDict, total=False):
    """Options of all requests for tokens. Times are in seconds."""

    model: str
    """The name of the model. If empty, the system's default model."""
    buffers: Sequence[str]
    """Names of the buffers whose contents precede the prompt."""
    priority: int
    """Higher priorities are served first; default: 0."""
    timeout_s: float
    """Time after which the request ends with RequestTimeoutError."""
    stall_s: float
    """If no message for the request arrives during this time, the client sends it again."""
    retry_s: float
    """If the queue is full or a worker is lost, the request is sent again until this time has
    passed. Default: 30."""
    on_system: OnSystem
    """The thread that reads the stream calls this function with each notice (loading, queued,
    retrying)."""
    trace: str
    """The ``traceparent`` of the request (W3C Trace Context); default: the active span, if any."""
    by: str
    """If one client serves several users: the user of this request. The requests of the users take
    turns in the queue."""
    request_id: str
    """The id of the request in the log lines of all processes, at most 128 characters."""


class ScoreOptions(RequestOptions, total=False):
    """The options of ``score``."""

    top_logprobs: int
    """Number of most likely tokens that are reported at each position, in addition to the scored
    token."""


class EmbedOptions(RequestOptions, total=False):
    """The options of ``embed``."""

    pooling: Pooling
    """How the hidden states of a text's tokens are pooled to one vector. Default: the pooling of
    the model."""


class GenerateOptions(RequestOptions, total=False):
    """The options of ``generate``. ``protocol.sampling`` describes the sampling parameters."""

    text: bool
    """Whether entries have text. Default: True if the prompt is text."""
    temperature: float
    max_tokens: int
    min_tokens: int
    logit_bias: dict[int, float]
    top_logprobs: int
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop: Sequence[str | int]
    ignore_eos: bool
    n: int
    save: str
    """Name of a buffer in which the broker stores the prompt and the output."""
    controller: str
    """The controller: a module id, a tag, the name of a built-in controller, or a served
    ``MODULE:NAME``."""
    controller_arg: str | dict[str, Any] | list[Any]
    """The argument of the controller. A text is sent unchanged, a list or a dict as JSON. Requires
    ``controller``."""
    heal_prompt: bool
    """Whether the prompt may end in the middle of a word. If true, the worker removes the prompt's
    last token, and the output must begin with the text of this token. Entries do not repeat this
    text: the text of the first token is only the part after the prompt."""
    processed_logprobs: bool
    """Whether entries have ``processed``: the log-probability under the distribution that the token
    was drawn from."""
    kept: bool
    """Whether entries have ``kept``: the candidates that the token was drawn from."""
    inspect: bool
    """Whether entries also have ``allowed``, ``cut``, ``bias`` and ``round_us``. These fields
    describe the controller's masks, biases and rounds."""


def generate_call(prompt: Prompt, options: GenerateOptions) -> Call:
    """Makes the call for a GENERATE. Raises TypeError if an option is unknown, and RequestError if
    an option that the client checks is not valid.

    A sampled request without a seed receives a seed here, so that a retry generates the same
    tokens.
    """
    given: dict[str, Any] = dict(options)
    timing = _timing(given)
    _check_names(given, Generate)
    if given.get("controller_arg") is not None and not given.get("controller"):
        raise RequestError(
            Code.INVALID_FIELD,
            "controller_arg is given without a controller; add the option controller",
            path="$.controller_arg",
        )
    given.setdefault("text", isinstance(prompt, str))
    if given.get("temperature") and given.get("seed") is None:
        given["seed"] = secrets.randbits(63)
    for name in ("stop", "buffers"):
        if name in given:
            given[name] = _as_list(given[name], name)
    body, attachments = _prompt(prompt)
    message = Generate(stream_id=0, prompt=body, timeout_s=timing["timeout_s"], **given)
    return Call(b"GENERATE", message, attachments, span=identify(message), **timing)


def score_call(prompt: Prompt, scored: Prompt, options: ScoreOptions) -> Call:
    """Makes the call for a SCORE."""
    given: dict[str, Any] = dict(options)
    timing = _timing(given)
    _check_names(given, Score)
    if "buffers" in given:
        given["buffers"] = _as_list(given["buffers"], "buffers")
    body, attachments = _prompt(prompt)
    ids = _checked(scored, "$.scored") if isinstance(scored, str) else _ids(scored, "$.scored")
    given.setdefault("text", isinstance(scored, str))
    message = Score(stream_id=0, prompt=body, scored=ids, timeout_s=timing["timeout_s"], **given)
    return Call(b"SCORE", message, attachments, span=identify(message), **timing)


def embed_call(inputs: Sequence[Sequence[int]], options: EmbedOptions) -> Call:
    """Makes the call for an EMBED."""
    given: dict[str, Any] = dict(options)
    timing = _timing(given)
    _check_names(given, Embed)
    ids = [_ids(one, f"$.inputs[{number}]") for number, one in enumerate(inputs)]
    message = Embed(stream_id=0, inputs=ids, timeout_s=timing["timeout_s"], **given)
    return Call(b"EMBED", message, **timing)


def _check_names(given: dict[str, Any], message: type[msgspec.Struct]) -> None:
    """Raises TypeError if an option in ``given`` is not a field of the message. ``_timing`` has
    already removed the options of the client itself."""
    for name in given.keys() - set(message.__struct_fields__):
        known = {*message.__struct_fields__, *RequestOptions.__annotations__}
        near = difflib.get_close_matches(name, known - {"stream_id", "prompt", "inputs"}, 1)
        remedy = f"; did you mean {near[0]!r}?" if near else ""
        raise TypeError(f"unknown option {name!r}{remedy}")


def model_info_call(model: str, timeout_s: float) -> Call:
    """Makes the call for a MODEL_INFO. The answer arrives after the model is loaded."""
    message = ModelInfoRequest(stream_id=0, model=model)
    return Call(b"MODEL_INFO", message, timeout_s=timeout_s, retry_s=timeout_s)


def tokenizer_call(model: str, timeout_s: float) -> Call:
    """Makes the call for a TOKENIZER. The answer arrives after the model is loaded."""
    message = ModelTokenizerRequest(stream_id=0, model=model)
    return Call(b"TOKENIZER", message, timeout_s=timeout_s, retry_s=timeout_s)


def status_call(
    timeout_s: float, streams: bool = False, metrics: bool = False, tools: Sequence[str] = ()
) -> Call:
    """Makes the call for a STATUS."""
    message = StatusRequest(stream_id=0, streams=streams, metrics=metrics, tools=list(tools))
    return Call(b"STATUS", message, timeout_s=timeout_s)


def drain_call(worker: str, timeout_s: float) -> Call:
    """Makes the call for a DRAIN."""
    return Call(b"DRAIN", DrainWorker(stream_id=0, worker=worker), timeout_s=timeout_s)


def pause_call(model: str, mode: PauseMode, timeout_s: float) -> Call:
    """Makes the call for a PAUSE."""
    message = PauseModel(stream_id=0, model=model, mode=mode)
    return Call(b"PAUSE", message, timeout_s=timeout_s)


def resume_call(model: str, timeout_s: float) -> Call:
    """Makes the call for a RESUME."""
    return Call(b"RESUME", ResumeModel(stream_id=0, model=model), timeout_s=timeout_s)


def update_call(
    folder: str | Path, model: str, version: int, mode: UpdateMode, timeout_s: float
) -> Call:
    """Makes the call for an UPDATE_WEIGHTS. ``timeout_s``: maximum time in which the workers read
    the weights, in seconds. The call times out after twice this time."""
    message = UpdateWeights(
        stream_id=0,
        folder=str(folder),
        model=model,
        version=version,
        mode=mode,
        timeout_s=timeout_s,
    )
    return Call(b"UPDATE_WEIGHTS", message, timeout_s=2 * timeout_s)


def file_call(
    weights: WeightsContent,
    model: str,
    version: int,
    mode: UpdateMode,
    timeout_s: float,
    shared: str = "",
) -> Call:
    """Makes the call for an UPDATE_WEIGHTS whose weights are sent over the bus, or are in the
    shared memory ``shared``."""
    message = UpdateWeights(
        stream_id=0,
        shared=shared,
        size=weights.size,
        sha256=weights.sha256,
        model=model,
        version=version,
        mode=mode,
        timeout_s=timeout_s,
    )
    return Call(b"UPDATE_WEIGHTS", message, timeout_s=2 * timeout_s)


def part_call(weights: WeightsContent, offset: int, part: bytes, timeout_s: float) -> Call:
    """Makes the call for a WEIGHTS."""
    message = SendWeights(stream_id=0, sha256=weights.sha256, offset=offset)
    return Call(b"WEIGHTS", message, (part,), timeout_s=timeout_s)


def rollout_of(answer: Msg) -> Rollout:
    """Returns the result in the answer to a PAUSE, RESUME or UPDATE_WEIGHTS."""
    return convert(answer.result, Rollout)


def drained_requests(answer: Msg) -> int:
    """Returns the number of requests that a drained worker had, from the answer to the DRAIN."""
    return int(answer.result["requests"])


def buffer_call(name: str, content: Prompt | None, timeout_s: float) -> Call:
    """Makes the call for a BUFFER. If ``content`` is None, the call deletes the buffer."""
    if content is None:
        return Call(b"BUFFER", Buffer(name=name), timeout_s=timeout_s)
    if isinstance(content, str):
        return Call(b"BUFFER", Buffer(name=name, text=content), timeout_s=timeout_s)
    return Call(b"BUFFER", Buffer(name=name), (_packed(content),), timeout_s=timeout_s)


def upload_call(wasm: bytes | Path, tag: str | None, timeout_s: float, by: str = "") -> Call:
    """Makes the call for an UPLOAD. ``wasm``: the module, or the path of the file of a module or a
    script. Raises OSError if the file cannot be read, and RequestError if the module is too
    large."""
    content = wasm if isinstance(wasm, bytes) else Path(wasm).read_bytes()
    language = None if isinstance(wasm, bytes) else language_of(Path(wasm).suffix)
    if language is not None:
        content = marked_script(content, language)
    if (too_large := module_too_large(len(content))) is not None:
        raise too_large
    return _store_call(b"UPLOAD", Upload(stream_id=0, tag=tag, by=by), timeout_s, (content,))


def tag_call(module: str, tags: Sequence[str], timeout_s: float, by: str = "") -> Call:
    """Makes the call for a TAG."""
    message = Tag(stream_id=0, module=module, tags=list(tags), by=by)
    return _store_call(b"TAG", message, timeout_s)


def tags_call(timeout_s: float) -> Call:
    """Makes the call for a TAGS."""
    return _store_call(b"TAGS", Tags(stream_id=0), timeout_s)


def delete_call(name: str, timeout_s: float) -> Call:
    """Makes the call for a DELETE."""
    return _store_call(b"DELETE", Delete(stream_id=0, module=name), timeout_s)


def stored_module(answer: Msg) -> StoredModule:
    """The module in an answer of the module store."""
    return convert(answer.result, StoredModule)


def stored_modules(answer: Msg) -> list[StoredModule]:
    """The modules in an answer of the module store."""
    return convert(answer.result, list[StoredModule])


def _store_call(
    message_type: bytes,
    message: Upload | Tag | Tags | Delete,
    timeout_s: float,
    attachments: tuple[bytes, ...] = (),
) -> Call:
    """Makes a call for the module store. Each call may be sent again, because a second call has no
    further effect."""
    return Call(message_type, message, attachments, timeout_s=timeout_s, retry_s=STORE_RETRY_S)


def _timing(given: dict[str, Any]) -> dict[str, Any]:
    """Removes from ``given`` the options that only the client itself uses, and returns them. Raises
    RequestError if a duration is not valid. The broker checks ``timeout_s``."""
    given.pop("on_system", None)
    stall_s = given.pop("stall_s", None)
    if stall_s is not None:
        _check_seconds("stall_s", stall_s, "above 0", lambda seconds: seconds > 0)
    retry_s = given.pop("retry_s", RETRY_S)
    _check_seconds("retry_s", retry_s, "of at least 0", lambda seconds: seconds >= 0)
    return {"timeout_s": given.pop("timeout_s", None), "stall_s": stall_s, "retry_s": retry_s}


def _check_seconds(
    name: str, seconds: object, expected: str, valid: Callable[[float], bool]
) -> None:
    if isinstance(seconds, int | float) and valid(seconds):
        return
    raise RequestError(
        Code.INVALID_FIELD,
        f"{name} is {seconds!r}; it must be a number of seconds {expected}",
        path=f"$.{name}",
    )


def _prompt(prompt: Prompt) -> tuple[str | None, tuple[bytes, ...]]:
    """Encodes a prompt: a text as the field ``prompt``, token ids as an attachment with 4 bytes per
    token."""
    if not isinstance(prompt, str):
        return None, (_packed(prompt),)
    return _checked(prompt, "$.prompt"), ()


def _checked(text: str, path: str) -> str:
    """Returns ``text``. Raises RequestError if UTF-8 cannot encode the text. For example, bytes
    were decoded with ``surrogateescape``."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        what = (
            f"the text is not valid UTF-8 at character {error.start} ({text[error.start]!r}); "
            "decode the bytes with their real encoding"
        )
        raise RequestError(Code.INVALID_FIELD, what, path=path) from None
    return text


def _packed(ids: Sequence[int]) -> bytes:
    if isinstance(ids, bytes | bytearray):
        raise RequestError(
            Code.INVALID_FIELD,
            "the prompt is bytes; it must be text or a list of token ids",
            path="$.prompt",
        )
    try:
        return pack_tokens(ids)
    except (TypeError, OverflowError, ValueError) as error:
        raise RequestError(
            Code.INVALID_FIELD,
            f"the prompt is not valid ({error}); it must be text or a list of token ids from 0 to "
            "2**32 - 1",
            path="$.prompt",
        ) from None


def _ids(ids: Sequence[int], path: str) -> list[int]:
    if isinstance(ids, str):
        raise RequestError(
            Code.INVALID_FIELD,
            f"{ids[:40]!r} is text; expected a list of token ids",
            path=path,
        )
    try:
        return [int(i) for i in ids]
    except (TypeError, ValueError) as error:
        raise RequestError(
            Code.INVALID_FIELD,
            f"the token ids are not valid ({error}); they must be whole numbers",
            path=path,
        ) from None


def _as_list(value: Any, name: str) -> list[Any]:
    if isinstance(value, str):
        raise RequestError(
            Code.INVALID_FIELD,
            f"{name} is {value!r}; it must be a list: [{value!r}]",
            path=f"$.{name}",
        )
    return list(value)
