"""The messages between a client and the broker, one struct each.

The body of each message type (``GENERATE``) is one of these structs, as JSON or msgpack. Unknown
fields are ignored. Source: LMTP (the language model transport protocol of LMQL), including the
features that LMTP lists as "future work": text mode, buffers, system messages, errors and retries.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType, field, msgpack

from .errors import Code, RequestError
from .metrics import Series
from .sampling import Distribution, Sampling, Scores, TokenId, TopLogprobs

PROTOCOL_VERSION = 1
ENCODINGS = ("json", "msgpack")

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Maximum number of bytes of a body."""
MAX_ATTACHMENT_BYTES = 4 * MAX_BODY_BYTES
"""Maximum number of bytes of the attachment of a message."""
MAX_MODULE_BYTES = 16 * 1024 * 1024
"""Maximum number of bytes of a controller module; the client and the broker refuse a larger
module."""
MAX_FRAMES = 3
"""Maximum number of frames of a client's message: the type, the body and an attachment."""

MAX_TIMEOUT_S = 86_400.0
"""The longest ``timeout_s`` of a request, in seconds: a day."""

MAX_FOLDER = 4096
"""Maximum number of characters of the path of a folder."""
WEIGHTS_PART_BYTES = 2**20
"""Maximum number of bytes of a part of a model's weights. The tokens of a step wait for at most one
part. Copying a part takes about 0.3 ms, and sending it takes about 1 ms on a network of 10
Gbit/s."""

MAX_STREAM_ID = 0x7FFF_FFFF_FFFF_FFFF
StreamId = Annotated[int, Meta(ge=0, le=MAX_STREAM_ID)]
Count = Annotated[int, Meta(ge=0)]
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]
Pause = Annotated[float, Meta(ge=0, le=MAX_TIMEOUT_S)]
"""Seconds to wait before another try."""
Period = Annotated[float, Meta(ge=0.001, le=MAX_TIMEOUT_S)]
"""An interval between messages, or a time without messages, in seconds. A shorter interval than
0.001 would keep a process busy."""
Name = Annotated[str, Meta(min_length=1, max_length=256)]
TOOL_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_./:-]{0,127}$"
"""The form of the names that tool workers register."""
MAX_DESCRIBED_TOOLS = 128
"""Maximum number of tools that a ``STATUS`` describes."""
UserName = Annotated[str, Meta(max_length=256)]
ModelName = Annotated[str, Meta(max_length=1024)]
"""The name of a model, or the path of its folder. The length is bounded because STATUS repeats the
name for each stream."""
ControllerName = Annotated[str, Meta(max_length=256)]
GroupName = Annotated[str, Meta(max_length=64)]
FinishReason = Literal["stop", "length", "controller", "cancelled", "timeout", "error"]
ConstraintEnd = Literal["complete", "closed", "cut"]
"""How the text of a sequence under a built-in constraint ended.

- ``complete``: the text fulfils the whole constraint
- ``closed``: the text fulfils the whole constraint, because the worker appended a completion before
  ``max_tokens`` was reached
- ``cut``: the text ended before it fulfilled the constraint
"""
Sha256 = Annotated[str, Meta(max_length=64)]
SharedName = Annotated[str, Meta(max_length=255)]
"""The name of a shared memory object of POSIX, without a slash."""
WeightsVersion = Annotated[int, Meta(ge=0, le=MAX_STREAM_ID)]
PauseMode = Literal["abort", "keep", "wait"]
UpdateMode = Literal["keep", "recompute"]
MAX_NAMES = 64
"""Maximum number of versions, encodings or capabilities in a HELLO."""
TraceParent = Annotated[str, Meta(max_length=256)]
RequestId = Annotated[str, Meta(max_length=128)]


# --- client to broker ---------------------------------------------------------------------------


class Hello(Struct, kw_only=True, omit_defaults=True):
    """``HELLO``: opens a session, or takes one over on a new connection.

    A client that does not send HELLO has an anonymous session, whose encoding is JSON. The session
    ends with the client's connection.
    """

    versions: Annotated[tuple[int, ...], Meta(max_length=MAX_NAMES)] = (PROTOCOL_VERSION,)
    encodings: Annotated[tuple[GroupName, ...], Meta(max_length=MAX_NAMES)] = ("json",)
    """The encodings that the client accepts, in order of preference. The broker uses the first one
    that it supports."""
    session: Annotated[str, Meta(max_length=256)] | None = None
    """The token from an earlier ``WELCOME``. The client takes over the session of this token. It
    must connect with the same key as the client that began the session."""
    begin: bool = False
    """Begin a new session whose token is ``session``. The client has chosen this token: a secret of
    32 hexadecimal digits. Has no effect if a session with this token exists already, even if it
    belongs to another key."""
    elsewhere: bool = False
    """Whether the session may have used another broker since its last connection to this broker.
    The broker then asks the workers for the session's live streams, and the client sends its
    buffers again."""
    keep_s: Annotated[float, Meta(ge=0)] = 0.0
    """If the client's connection is lost, the session and its streams continue for at least this
    number of seconds. For example, a program can wait for the next input of a user who has left.
    The broker's settings ``session_grace_s`` and ``max_keep_s`` are the lower and the upper bound
    of this time. Over a gateway, the field has no effect unless the client's API key has its own
    tenant."""
    client: UserName = ""
    """Name and version of the program, for the operator."""
    capabilities: Annotated[list[GroupName], Meta(max_length=MAX_NAMES)] = []
    """Optional features of the client.

    - ``ping``: the client sends PING, and its session may expire
    - ``ack``: the client's PINGs have ``ack``
    - ``bodies``: the client accepts several bodies in one TOKEN
    - ``columns``: the client accepts TOKEN in columns, which are only sent in msgpack
    - ``text_columns``: with ``columns``, the client accepts rows with text
    - ``recover``: the client handles ``Welcome.recovering``
    - ``gateway``: the client carries messages of other users, so it never has the operator's rights
    """


class Generate(Sampling, kw_only=True, omit_defaults=True):
    """``GENERATE``: begin a stream of tokens."""

    stream_id: StreamId
    """Chosen by the client, unique among the live streams of its session."""
    model: ModelName = ""
    """The name of the model; if empty, the default model. Each GPU worker has a default. If all of
    them have the same default, this is the default model. If their defaults differ, the default
    model is the embedded model, provided that at least one worker has it as its default."""
    prompt: list[TokenId] | str | None = None
    """Token ids, or text that the worker tokenizes. If None, attachment 0 has the ids, u32 each.
    Without an attachment, the prompt consists of the buffers."""
    buffers: list[Name] = []
    """Buffers that precede the prompt, in order."""
    save: Name | None = None
    """When the stream ends, store the prompt and the tokens of sequence 0 in a buffer of this
    name."""
    text: bool = False
    """Text mode: each entry with a token also has a text. The text has the characters that the
    token completes."""
    controller: ControllerName | None = None
    """The controller: the tag or the id of a module, or the name of a built-in constraint, or the
    name of a Python controller that the operator serves. The first characters of an id (at least 8)
    are sufficient."""
    controller_arg: str | dict[str, Any] | list[Any] | None = None
    """The argument of the controller. A text is passed unchanged, any other value as JSON."""
    heal_prompt: bool = False
    """Remove the last token of the prompt, and force the first sampled token to begin with the text
    of the removed token. The text of the stream does not repeat this text. Only possible without a
    controller or with a built-in constraint."""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    """Higher priorities are served first."""
    timeout_s: Timeout | None = None
    """End the stream, with the finish reason ``timeout``, this many seconds after the request
    arrived."""
    by: UserName = ""
    """The user who sent the request. Only given if one session serves several users. In the queue,
    the requests of the users take turns."""
    group: GroupName = ""
    """A secret that several sessions of one client have in common, such as the sessions of a
    gateway. In the queue, their requests take turns as if they belonged to one session."""
    inspect: bool = False
    """Whether TOKEN entries also have the fields ``allowed``, ``cut``, ``bias`` and ``round_us``.
    They describe the controller's masks, biases and rounds."""
    trace: TraceParent = ""
    """The ``traceparent`` of the request (W3C Trace Context); workers pass it on unchanged."""
    request_id: RequestId = ""
    """The id of the request in the log lines of all processes; default: the trace id in ``trace``,
    if the request has a trace."""


def controller_of(controller: str | None, heal_prompt: bool) -> str:
    """The name of the controller under which a GENERATE runs; empty if the stream has no
    controller.

    A request with ``heal_prompt`` needs a controller. If it does not name a controller, it runs
    under ``structural``.
    """
    return controller or ("structural" if heal_prompt else "")


class Queued(Struct, kw_only=True, omit_defaults=True):
    """Fields that SCORE and EMBED have in common with GENERATE, with the same meaning."""

    stream_id: StreamId
    model: ModelName = ""
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    timeout_s: Timeout | None = None
    by: UserName = ""
    group: GroupName = ""
    trace: TraceParent = ""
    request_id: RequestId = ""


class Score(Queued, kw_only=True, omit_defaults=True):
    """``SCORE``: the log-probability of each token of ``scored``, given all tokens before it."""

    scored: list[TokenId] | str
    prompt: list[TokenId] | str | None = None
    buffers: list[Name] = []
    text: bool = False
    """Whether each entry also has the text of its token."""
    top_logprobs: TopLogprobs = 0
    """Number of the most likely tokens to report at each position, in addition to the scored
    token."""


class Cancel(Struct, kw_only=True, omit_defaults=True):
    """``CANCEL``: end a stream, with ``reason`` as the finish reason of its last TOKEN entry."""

    stream_id: StreamId
    reason: Literal["cancelled", "timeout"] = "cancelled"


class Attach(Struct, kw_only=True, omit_defaults=True):
    """``ATTACH``: resume a stream of this session.

    The answer is an ``ERROR`` or ``MSG {"attached": …}``. After this ``MSG``, the broker sends the
    entries of the stream from number ``attached`` on. The client discards entries that arrive
    before the answer.
    """

    stream_id: StreamId
    received: Count
    """Number of TOKEN entries of the stream that the client has received."""
    moves: Count = 0
    """The last ``moves`` that the client has received for the stream (in SYSTEM or MSG); 0 if it
    has not received any."""


MAX_INPUT_BYTES = 32_768
"""Maximum number of bytes of the text of an INPUT, as UTF-8."""
MAX_WAITING_INPUTS = 64
"""Maximum number of inputs of a stream that its program has not received yet."""
MAX_WAITING_INPUT_BYTES = 262_144
"""Maximum number of bytes of all inputs of a stream that its program has not received yet."""


class Input(Struct, kw_only=True, omit_defaults=True):
    """``INPUT``: a text for the program of a running stream of this session. The program receives
    it with the call ``receive``.

    The answer is ``MSG {"input": …}`` with the number of the input. If no answer arrives, the
    client sends the input again with the same number. The program receives the input only once. If
    the input is refused, the stream continues.
    """

    stream_id: StreamId
    number: Annotated[int, Meta(ge=1, le=0x7FFF_FFFF)]
    """The number of the input in its stream, from 1."""
    text: str


class InputAnswer(Struct, kw_only=True, omit_defaults=True):
    """The answer to an ``INPUT``. Without a ``code``, the input was stored; with a ``code``, it was
    refused."""

    number: int
    """The number of the input."""
    code: str | None = None
    message: str = ""
    retry_after_s: Pause | None = None
    """Seconds to wait before the client sends the refused input again. None if the input would be
    refused again."""


class Buffer(Struct, kw_only=True, omit_defaults=True):
    """``BUFFER``: store a text or token ids in the session under a name. If a request lists this
    name in ``buffers``, its prompt contains the buffer.

    The message has at most one of ``tokens``, ``text`` and attachment 0 (u32 ids). Without any of
    these, the buffer is deleted.
    """

    name: Name
    tokens: list[TokenId] | None = None
    text: str | None = None


class ModelInfoRequest(Struct, kw_only=True, omit_defaults=True):
    """``MODEL_INFO``: the properties of a model; answered by ``MSG {"model_info": …}``."""

    stream_id: StreamId
    model: ModelName = ""


class ModelTokenizerRequest(Struct, kw_only=True, omit_defaults=True):
    """``TOKENIZER``: the tokenizer of a model; answered by ``MSG {"tokenizer": …}``.

    If the model does not have a tokenizer in the form of the tokenizers library, the answer is the
    error ``unsupported``.
    """

    stream_id: StreamId
    model: ModelName = ""


MAX_INPUTS = 256
"""Maximum number of inputs of an EMBED."""
Pooling = Literal["last", "mean", "first"]
"""How the hidden states of a text's tokens become one vector: the last token's state, the mean of
all states, or the first token's state."""


class Embed(Queued, kw_only=True, omit_defaults=True):
    """``EMBED``: one vector for each input, computed from the hidden states after the model's last
    layer. Answered by ``MSG {"embedded": …}``."""

    inputs: Annotated[
        list[Annotated[list[TokenId], Meta(min_length=1)]],
        Meta(min_length=1, max_length=MAX_INPUTS),
    ]
    """The token ids of each input."""
    pooling: Pooling | None = None
    """If None, the checkpoint determines the pooling (``1_Pooling/config.json``). If the checkpoint
    does not name a pooling, it is ``mean`` for an encoder, and ``last`` for a causal model."""


class Embedded(Struct, kw_only=True, omit_defaults=True):
    """The vectors of the inputs of an ``EMBED``."""

    dimensions: int
    """Number of elements of each vector."""
    vectors: bytes
    """The vectors, one after another, as little-endian float32. Each vector has the L2 norm 1. In
    JSON, the bytes are encoded as base64."""
    pooling: Pooling


class StatusRequest(Struct, kw_only=True, omit_defaults=True):
    """``STATUS``: workers, sessions and queues; answered by ``MSG {"status": …}``."""

    stream_id: StreamId
    streams: bool = False
    """List the live streams too. The operator receives all streams. A user of a gateway receives
    the streams of its own session. Any other client receives the streams of all clients with its
    key."""
    own: bool = False
    """List only the streams of this session, for every kind of client."""
    metrics: bool = False
    """Include the counters and histograms of the broker and of each worker."""
    tools: Annotated[list[Name], Meta(max_length=MAX_DESCRIBED_TOOLS)] = []
    """Names of tools to describe. If the list has a tool that the sender's programs may not call,
    the answer is the error ``not_allowed``. If it has a tool that no worker serves, the answer is
    the error ``no_worker``."""


def module_too_large(size: int) -> RequestError | None:
    """The error for a module of ``size`` bytes; None if it is not too large."""
    if size <= MAX_MODULE_BYTES:
        return None
    return RequestError(
        Code.TOO_LARGE,
        f"the module has {size} bytes; the limit is {MAX_MODULE_BYTES}",
        path="$.data",
    )


class Upload(Struct, kw_only=True, omit_defaults=True):
    """``UPLOAD``: store a controller module or a script, given as ``data`` or as attachment 0.

    The answer is ``MSG`` with a ``StoredModule`` as its result.
    """

    stream_id: StreamId
    data: bytes | None = None
    tag: Name | None = None
    by: UserName = ""
    """The person or program that uploads the module, for display only. A program that serves
    several users names the user here."""


class Tag(Struct, kw_only=True, omit_defaults=True):
    """``TAG``: assign tags to a module, and remove them from all other modules.

    Answered by ``MSG`` with a ``StoredModule`` as its result.
    """

    stream_id: StreamId
    module: Name
    """The id of the module, the first characters of the id (at least 8), or another tag of the
    module."""
    tags: list[Name]
    by: UserName = ""
    """The person or program that assigns the tags, for display."""


class Tags(Struct, kw_only=True, omit_defaults=True):
    """``TAGS``: list the modules of this tenant and their tags.

    Answered by ``MSG`` with a list of ``StoredModule`` as its result.
    """

    stream_id: StreamId


class Delete(Struct, kw_only=True, omit_defaults=True):
    """``DELETE``: delete a tag, or a module with all its tags.

    The answer is ``MSG``. Its result is a ``StoredModule`` that describes the deleted tag or
    module.
    """

    stream_id: StreamId
    module: Name
    """A tag, the id of a module, or the first characters of the id (at least 8)."""


class DrainWorker(Struct, kw_only=True, omit_defaults=True):
    """``DRAIN``: make a worker leave. The worker is not assigned any further requests, and hands
    over its streams if other workers can take them.

    When the worker has left, the answer is a ``MSG`` whose result is
    ``{"worker": name, "requests": number}``. ``requests`` is the number of requests that the worker
    had when DRAIN arrived. Only the operator may send DRAIN. The operator is a client with the
    operator's key. If the broker has no keys, it is any client on the broker's machine except a
    gateway.
    """

    stream_id: StreamId
    worker: Name
    """The worker's name, as in ``STATUS``."""


class PauseModel(Struct, kw_only=True, omit_defaults=True):
    """``PAUSE``: the workers of a model stop the model's steps. Later requests wait for RESUME.

    Only the operator may send PAUSE, RESUME and UPDATE_WEIGHTS. When all workers of the model have
    followed the order, the answer is sent: a ``MSG`` with a ``Rollout`` as its result.
    """

    stream_id: StreamId
    model: ModelName = ""
    """The name of the model; if empty, the default model."""
    mode: PauseMode = "keep"
    """``keep``: live streams stop between two steps, and continue after RESUME. ``wait``: the
    workers complete the live streams before the pause begins. ``abort``: live streams end as
    ``cancelled``."""


class ResumeModel(Struct, kw_only=True, omit_defaults=True):
    """``RESUME``: ends the pause of a model."""

    stream_id: StreamId
    model: ModelName = ""
    """The name of the model; if empty, the default model."""


class UpdateWeights(Struct, kw_only=True, omit_defaults=True):
    """``UPDATE_WEIGHTS``: the workers of a model replace the model's weights while streams run.

    The weights are in ``folder``, or in one safetensors file with ``size`` and ``sha256``. If
    ``shared`` is given, the file is in this shared memory of the workers' machine. If neither
    ``folder`` nor ``shared`` is given, the client sends the file in WEIGHTS messages after this
    message.

    Each worker first reads and checks the new weights. If the checks of all workers succeed, each
    worker replaces its weights between two steps. If a check fails, the answer is an ``ERROR``, and
    no worker changes its weights.
    """

    stream_id: StreamId
    folder: Annotated[str, Meta(max_length=MAX_FOLDER)] = ""
    """The absolute path of the folder of the safetensors files on the workers' machines. The
    workers' setting ``allow`` must admit the path."""
    shared: SharedName = ""
    """The name of the shared memory object, as for ``shm_open``. The object begins with the
    file."""
    size: Count = 0
    """Number of bytes of the file."""
    sha256: Sha256 = ""
    """SHA-256 of the file, hexadecimal. Weights with another hash are not used."""
    model: ModelName = ""
    """The name of the model; if empty, the default model."""
    version: WeightsVersion = 0
    """The number of the new version, above the number of the current version; 0 stands for the next
    number."""
    mode: UpdateMode = "recompute"
    """``recompute``: the KV cache of live streams is computed again. ``keep``: live streams keep
    their KV cache, and their spans have ``kept_cache``."""
    timeout_s: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)] = 600.0
    """The broker gives up the update if a worker has not read the weights after this number of
    seconds."""


class SendWeights(Struct, kw_only=True, omit_defaults=True):
    """``WEIGHTS``: the next part of the file of an UPDATE_WEIGHTS. The bytes are attachment 0.

    When the broker has passed the part to all workers that read the weights, the answer is a
    ``MSG`` with the result ``{"sent": number}``. ``sent`` is the number of bytes that were passed
    so far. Only the operator may send WEIGHTS.
    """

    stream_id: StreamId
    sha256: Sha256
    """``sha256`` of the UPDATE_WEIGHTS to which the part belongs. The same session must have sent
    this UPDATE_WEIGHTS."""
    offset: Count = 0
    """Number of bytes of all earlier parts."""


class Rollout(Struct, kw_only=True, omit_defaults=True):
    """The result of PAUSE, RESUME and UPDATE_WEIGHTS."""

    model: str
    version: WeightsVersion = 0
    """The version of the weights."""
    workers: Count = 0
    """Number of workers that have followed the order."""
    streams: Count = 0
    """Number of live streams that stopped, were aborted, or continue under the new weights."""
    update_pause_ms: float = 0.0
    """Each worker stops its steps while it replaces the weights. This is the longest of these
    stops, in milliseconds."""
    weights: str = ""
    """``Span.weights`` of the new weights, as the first worker reports it."""


class Ping(Struct, kw_only=True, omit_defaults=True):
    """``PING``: answered by ``PONG`` with the same number. PINGs keep the session from expiring."""

    n: Count = 0
    ack: Count = 0
    """The last ``Pong.position`` that the client has received on this connection. By this, the
    client confirms that it has received all messages before that PONG."""


class Bye(Struct, kw_only=True, omit_defaults=True):
    """``BYE``: ends the session and its streams."""

    keep: bool = False
    """Whether only the connection ends, as if it had been lost. A session that began with ``HELLO``
    can then be taken over, but an anonymous session ends. Programs that pass on the connections of
    other clients, such as gateways, set this flag."""


# --- broker to client ---------------------------------------------------------------------------


class Welcome(Struct, kw_only=True, omit_defaults=True):
    """``WELCOME``: the answer to ``HELLO``."""

    version: int
    encoding: str
    session: str
    """The token of the session. A client that has the token can take the session over."""
    resumed: bool = False
    """Whether ``HELLO`` took over a session of this broker, with its buffers. The session's streams
    then wait for ``ATTACH``."""
    streams: list[StreamId] = []
    """The streams of a session that was taken over: the live streams, and the streams whose end the
    client has not acknowledged. If ``recovering`` is true, workers may report more streams
    later."""
    recovering: bool = False
    """Whether the session comes from an earlier run of the broker, or from another broker. Workers
    may then still report its streams. When a worker reports a stream, the broker answers the
    stream's ``ATTACH``. If no worker has reported the stream when the time for reports is over, the
    answer is ``unknown_stream``. Buffers are lost."""
    server: str = ""
    capabilities: list[str] = []
    ping_s: Period = 2.0
    """Interval at which the client sends PING, in seconds."""
    expiry_s: Period = 10.0
    """If a client with the capability ``ping`` does not send a message for this number of seconds,
    the broker treats the connection as lost. The session and its streams end some time later,
    unless the client resumes the session."""
    max_body_bytes: int = MAX_BODY_BYTES


class Span(Struct, kw_only=True, omit_defaults=True, frozen=True):
    """How the tokens of a sequence are computed, until its next span begins."""

    weights: str
    """The hash of the weights: the first half of the SHA-256 of the loaded weights, in hexadecimal.
    If the hashes are equal, the weights are equal. With a LoRA adapter, ``+NAME@HASH`` follows: the
    name and the hash of the adapter."""
    exact: str = ""
    """The arithmetic of the forwards, such as ``AVX512``. Empty if the bits of logits and
    log-probabilities depend on the batch. If this field is not empty, and two spans have equal
    fields, equal sequences have equal bits in both spans."""
    version: WeightsVersion = 0
    """The version number that the last UPDATE_WEIGHTS gave to the weights; 0 if there was no
    UPDATE_WEIGHTS."""
    kept_cache: bool = False
    """Whether the sequence kept keys and values of an earlier version of the weights (the mode
    ``keep`` of UPDATE_WEIGHTS). ``exact`` is then empty."""


class Token(Struct, kw_only=True, omit_defaults=True):
    """An entry of ``TOKEN``, whose body is a list of entries, or columns (``columns.py``).

    The first four fields, and ``top_logprobs`` of a GENERATE, are LMTP's. They are always present.
    """

    token: int | None
    """The id of the token; None if the entry does not have a token, but only other information."""
    stream_id: StreamId
    logprob: float | None
    """Natural log-probability under the model's own distribution, before bias and temperature."""
    finish_reason: FinishReason | None
    top_logprobs: dict[int, float] | UnsetType = UNSET
    """Log-probabilities of the most likely tokens and of this token, by id. Entries of a SCORE have
    them only if the SCORE requests them."""
    processed: float | UnsetType = UNSET
    """With ``processed_logprobs``: the natural log-probability under the distribution that the
    token was drawn from, after bias, penalties, mask, temperature, ``top_k``, ``top_p`` and
    ``min_p``. 0 for a greedy token."""
    kept: int | list[int] | UnsetType = UNSET
    """With ``Sampling.kept``: the ids of the candidates that the token was drawn from, in ascending
    order. If all tokens of the vocabulary, or more than ``MAX_KEPT`` tokens, were candidates, this
    is their number."""
    pos: int = 0
    """Position of the token in its sequence, counted from the first generated or scored token."""
    seq: int = 0
    """The number of the entry's sequence in the stream, from 0."""
    parent: int | None = None
    """In the first entry of a fork: the sequence from which it was forked."""
    text: str | UnsetType = UNSET
    """Text mode: the text that this token completes."""
    backtrack: int = 0
    """Number of tokens to remove from the end of the sequence before ``token`` is appended."""
    prompt: list[TokenId] = []
    """The prompt with which the sequence begins anew. It replaces the sequence's former prompt.
    ``backtrack`` is then the number of all tokens after the former prompt."""
    logs: str = ""
    storage: list[Any] = []
    messages: list[str] = []
    """The texts that the program of the stream has sent to its client, in order."""
    waiting: int = 0
    """The number of the ``INPUT`` that the program of the sequence waits for; 0 if the program does
    not wait. The next entry of the sequence ends the wait."""
    error: str | None = None
    code: str | None = None
    """The code that belongs to ``error``."""
    live: int = 0
    """In an entry with a finish_reason: the number of sequences of the stream that still run. If it
    is 0, the stream has ended."""
    stop: str | int | None = None
    """In an entry with a finish_reason: the element of the request's ``stop`` that ended the
    sequence; None if the sequence ended for another reason, such as an end-of-sequence token."""
    span: Span | None = None
    """How the tokens of the sequence are computed from this entry on. Present in the first entry of
    a sequence, in its first entry from another worker, and in its first entry after an update of
    the weights."""
    exact: bool | None = None
    """In the last entry of a sequence: whether all steps of the stream so far were exact, with the
    same arithmetic (``Span.exact``). Steps at earlier workers count too. If true, the bits of the
    sequence's logits and log-probabilities do not depend on batches, chunks, drafts, forks and
    moves."""
    prompt_tokens: int = 0
    """In the first entry of a stream: the number of tokens of its prompt, including its buffers."""
    cached_tokens: int = 0
    """In the first entry of a stream: the number of prompt tokens that were in the cache
    already."""
    constraint: ConstraintEnd | None = None
    """In the last entry of a sequence under a built-in constraint: how its text ended."""
    allowed: int | UnsetType = UNSET
    """``inspect``: how many tokens the mask and the controller's bias allowed at this position;
    absent if the controller gave neither."""
    cut: list[int] = []
    """``inspect``: the most likely tokens that the mask and the bias forbade, the likeliest
    first."""
    round_us: int = 0
    """``inspect``: the time of the controller's round before this token, in microseconds."""
    bias: dict[int, float] = {}
    """``inspect``: the controller's bias of the most likely tokens, and of this token. Tokens with
    a bias of 0, and forbidden tokens, are left out."""
    distribution: Distribution | None = None
    """The answer to the controller's ``Query`` about this token. It is in the stream for replays of
    the controller. In an entry without a token, it answers the action ``look``."""
    wakes: int = 0
    """How often the sequence was woken from suspension since its last sampled token. Replays of the
    controller need this number."""
    scores: Scores = []
    """The program of the stream has scored texts as continuations of the sequence. These are their
    scores. They are in the stream for replays of the controller."""

    @property
    def is_report(self) -> bool:
        """Whether the entry is a report. A report has only messages, logs or writes of a program,
        or says that the program waits. Reports are not counted as entries: if another worker runs
        the request again, it may send the same messages in more or in fewer entries."""
        changes = self.token is not None or self.backtrack or self.prompt or self.is_input
        return not changes and self.parent is None and self.finish_reason is None

    @property
    def written_bytes(self) -> int:
        """Number of bytes of the logs, the messages and the writes of a program."""
        size = len(self.logs) + sum(map(len, self.messages))
        return size + len(msgpack.encode(self.storage)) if self.storage else size

    @property
    def is_input(self) -> bool:
        """Whether the entry has an input of the sequence's controller: a sampled token, scores, or
        a distribution."""
        sampled = self.token is not None and self.logprob is not None
        return sampled or bool(self.scores) or self.distribution is not None


class Quantized(Struct, kw_only=True, omit_defaults=True):
    """How a GPU worker has quantized the weights of a model, and the loss of the quantization. The
    worker measured the loss on a fixed text when it loaded the model."""

    kind: str
    """``int8`` or ``int4``."""
    saved_bytes: int
    """The memory that the weights no longer take, in bytes."""
    divergence: float
    """The mean Kullback-Leibler divergence between the distributions of the next token before and
    after the quantization, in nats."""
    perplexity: float
    """The perplexity of the text."""
    perplexity_before: float
    """The perplexity of the text before the quantization."""


class ForwardPath(Struct, kw_only=True, omit_defaults=True):
    """How a GPU worker computes the steps of a model."""

    attention: str = ""
    """The kind of attention, for example ``FlashAttention over blocks``, ``native code over
    blocks`` or ``SDPA over gathered blocks``."""
    graphs: int = 0
    """Number of batch sizes that have a CUDA graph."""
    fallbacks: list[str] = []
    """The fast paths that the device supports but the worker does not use, each with the reason;
    empty on a CPU."""
    exact: bool = False
    """Whether the logits and log-probabilities of a sequence have the same bits in every batch."""
    why_not_exact: str = ""
    """The reason if ``exact`` is false."""
    arithmetic: str = ""
    """``Span.exact`` of the streams of this model."""
    weights: str = ""
    """``Span.weights`` of the streams of this model."""
    version: WeightsVersion = 0
    """``Span.version`` of the streams of this model."""
    quantized: Quantized | None = None
    """None unless the worker has quantized the weights (setting ``quantize``)."""


class ModelInfo(Struct, kw_only=True, omit_defaults=True):
    """The properties of a model."""

    name: str
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    fingerprint: str
    """SHA-256 of the tokenizer's canonical JSON. Models with equal fingerprints tokenize a text in
    the same way."""
    architecture: str = ""
    parameters: int = 0
    dtype: str = ""
    device: str = ""
    sampling: int = 1
    """The version of the sampling algorithm. Workers with different versions may draw different
    tokens from equal seeds."""
    path: ForwardPath = field(default_factory=ForwardPath)
    parent: str = ""
    """For a LoRA adapter: the name of the model that it adapts. Otherwise empty."""
    adapter: str = ""
    """For a LoRA adapter: its hash. Otherwise empty."""


class Tagged(Struct, kw_only=True, omit_defaults=True):
    """The origin of a module's tag."""

    at: float = 0.0
    """When the tag was last assigned, in seconds since 1970."""
    by: str = ""
    """The name of the user who assigned the tag (``by`` of the request), or else the name of the
    tenant; empty if neither has a name."""


class StoredModule(Struct, kw_only=True, omit_defaults=True):
    """A controller module or a script in the store of a tenant."""

    module: str
    """The id of the module: SHA-256 of the uploaded bytes, hexadecimal."""
    tags: list[str] = []
    size: int = 0
    """Size of the upload in bytes."""
    uploaded: float = 0.0
    """When the module was uploaded, in seconds since 1970."""
    abi: str = ""
    """The interface that the module implements: ``native`` or ``aici``. For a script: its
    language."""
    forks: bool = True
    """Whether the sequences that the module steers may fork."""
    why_no_fork: str = ""
    """If ``forks`` is false: the part of the module's state that cannot be copied to a fork."""
    compiled_size: int = 0
    """Size of the module's compiled form in bytes."""
    compile_ms: float = 0.0
    """The time to compile the upload, in milliseconds; almost 0 if the module was compiled
    before."""
    tagged: dict[str, Tagged] = {}
    """The origin of each of ``tags``."""


class TokenizerFiles(Struct, kw_only=True, omit_defaults=True):
    """The tokenizer of a model, for programs that tokenize and detokenize themselves."""

    fingerprint: str
    """SHA-256 of the tokenizer's canonical JSON, as in ``ModelInfo``."""
    json: str
    """The content of the file that the tokenizers library reads (``tokenizer.json``). The file has
    up to about 20 MB."""
    chat_template: str = ""
    """The chat template in Jinja, as in transformers; empty if the model has no chat template."""
    special_tokens: dict[str, str] = {}
    """The special tokens by their names in transformers: ``bos_token``, ``eos_token``,
    ``pad_token``, …"""


class StreamStatus(Struct, kw_only=True, omit_defaults=True):
    """A live stream, as ``STATUS`` with ``streams`` shows it."""

    request: int
    """The id that the broker has assigned to the request."""
    type: str
    """``GENERATE``, ``SCORE``, or another message that a worker answers."""
    state: Literal["waiting", "running"]
    """Whether the stream waits for a worker, or runs at a worker."""
    age_s: float
    """Seconds since the request arrived."""
    client: str = ""
    """The name of the client's program (``Hello.client``)."""
    model: str = ""
    worker: str = ""
    controller: str = ""
    controller_worker: str = ""
    priority: int = 0


class Tool(Struct, kw_only=True, omit_defaults=True):
    """A function that a tool worker serves."""

    name: Name
    description: str = ""
    parameters: dict[str, Any] = {}
    """The JSON schema of the function's arguments. The arguments are an object."""
    timeout_s: Period = 30.0
    """Maximum time from the arrival of a call to its answer, in seconds."""


class WorkerStatus(Struct, kw_only=True, omit_defaults=True):
    """A worker, as ``STATUS`` shows it."""

    name: str
    role: str
    pid: int
    host: str
    state: str
    models: list[str]
    """The models that are loaded."""
    controllers: list[str] = []
    """The controllers that a controller worker serves by name; uploaded modules are not
    listed."""
    tools: list[str] = []
    """The names of the functions that a tool worker serves."""
    missing_layers: list[str] = []
    """Layers of isolation that the guests of a controller worker lack, with the reasons."""
    requests: int
    capacity: int
    heartbeat_age_s: float
    step_age_s: float | None = None
    load: dict[str, float] = {}
    paths: dict[str, ForwardPath] = {}
    """How a GPU worker computes the steps of each model, by model."""
    metrics: list[Series] = []
    """With ``metrics``: the metrics of the worker as of its last heartbeat."""


class Status(Struct, kw_only=True, omit_defaults=True):
    """The answer to ``STATUS``."""

    version: str
    uptime_s: float
    sessions: int
    streams: int
    queued: int
    workers: list[WorkerStatus]
    counters: dict[str, int] = {}
    paused: dict[str, PauseMode] = {}
    """The paused models, and the mode of their pauses."""
    live: list[StreamStatus] = []
    """With ``streams``: the live streams that the sender may see (``StatusRequest.streams``), in
    the order of their arrival."""
    metrics: list[Series] = []
    """With ``metrics``: the metrics of the broker itself."""
    tools: list[Tool] = []
    """The tools that ``StatusRequest.tools`` names, in the same order."""


class Msg(Struct, kw_only=True, omit_defaults=True):
    """``MSG``: the answer to a request that is not a stream."""

    stream_id: StreamId
    model_info: ModelInfo | UnsetType = UNSET
    status: Status | UnsetType = UNSET
    attached: int | UnsetType = UNSET
    """Answers an ``ATTACH``: the number of the first entry that follows. This is usually
    ``Attach.received``. It is 0 if two workers had copies of the stream, and the client has
    received entries of the wrong copy. The copies may order the entries of different sequences
    differently. So the client discards the first entries of each sequence, as many as it has
    already received."""
    moves: int = 0
    """With ``attached``: how often the stream has moved (``Attach.moves``)."""
    tokenizer: TokenizerFiles | UnsetType = UNSET
    embedded: Embedded | UnsetType = UNSET
    input: InputAnswer | UnsetType = UNSET
    """The answer to an ``INPUT``; the stream continues."""
    result: Any = UNSET


SystemEvent = Literal[
    "queued", "loading", "loaded", "moved", "not_movable", "throttled", "draining", "retrying"
]
"""The client itself emits ``retrying`` when it sends a lost or refused request again."""


class System(Struct, kw_only=True, omit_defaults=True):
    """``SYSTEM``: an event of a stream, for display. For example, the stream waits or has moved.
    The stream's entries do not contain such events."""

    event: SystemEvent
    message: str
    stream_id: StreamId | None = None
    model: str = ""
    place: int | None = None
    """``queued``: the position in the queue, from 1. None if the request has a worker, and only its
    controller waits."""
    progress: float | None = None
    """``loading``: the fraction that is loaded, 0 to 1."""
    left: str = ""
    """``moved``: the worker that had the stream, or that ran its controller."""
    worker: str = ""
    """``moved``: the worker that has the stream now."""
    pause_s: float | None = None
    """``moved``: the seconds from the loss of the former worker to the first new token."""
    moves: int = 0
    """``moved``: how often the stream has moved to another worker, for ``ATTACH``."""


class Error(Struct, kw_only=True, omit_defaults=True):
    """``ERROR``: a request was refused, or a stream failed."""

    code: str
    message: str
    stream_id: StreamId | None = None
    """The stream that this error ends. None if the error does not concern a stream, or if the
    message's ``stream_id`` could not be read. With ``duplicate_stream``, only the new request ends,
    and the earlier stream with this id continues."""
    path: str | None = None
    """The path of the invalid field, such as ``$.max_tokens``."""
    retry_after_s: Pause | None = None
    """Seconds to wait before the request is sent again."""
    type: str | None = None
    """The type of the refused message, if the error does not concern a stream."""


class Pong(Struct, kw_only=True, omit_defaults=True):
    """``PONG``: the answer to ``PING``."""

    n: Count = 0
    session: bool = True
    """Whether this connection has a session that began with ``HELLO``. If false, the client sends
    ``HELLO`` again. For example, the broker was restarted, or the session has expired."""
    position: Count = 0
    """For a client with the capability ``ack``: the number of ends of requests that were sent on
    this connection so far."""


CLIENT_MESSAGES: dict[bytes, Any] = {
    b"HELLO": Hello,
    b"GENERATE": Generate,
    b"SCORE": Score,
    b"CANCEL": Cancel,
    b"ATTACH": Attach,
    b"INPUT": Input,
    b"BUFFER": Buffer,
    b"MODEL_INFO": ModelInfoRequest,
    b"TOKENIZER": ModelTokenizerRequest,
    b"EMBED": Embed,
    b"STATUS": StatusRequest,
    b"UPLOAD": Upload,
    b"TAG": Tag,
    b"TAGS": Tags,
    b"DELETE": Delete,
    b"DRAIN": DrainWorker,
    b"PAUSE": PauseModel,
    b"RESUME": ResumeModel,
    b"UPDATE_WEIGHTS": UpdateWeights,
    b"WEIGHTS": SendWeights,
    b"PING": Ping,
    b"BYE": Bye,
}
"""The messages that a client sends: the struct of the body, by message type."""

OPERATOR_MESSAGES = frozenset({b"DRAIN", b"PAUSE", b"RESUME", b"UPDATE_WEIGHTS", b"WEIGHTS"})
"""Messages that only the operator may send."""
CARRIES_USERS = "gateway"
"""The capability of a client that passes on messages of other users."""

SERVER_MESSAGES: dict[bytes, Any] = {
    b"WELCOME": Welcome,
    b"TOKEN": list[Token],
    b"MSG": Msg,
    b"SYSTEM": System,
    b"ERROR": Error,
    b"PONG": Pong,
}
"""The messages that the broker sends to a client: the type of the body, by message type."""
