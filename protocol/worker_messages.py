"""The messages between the broker and its workers, beside those of clients that it passes on.

Each has a header (``header.py``) between type and body; bodies are msgpack. Source: the worker's
half of ZeroMQ's Majordomo (register, heartbeat, disconnect), AICI's step.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from .messages import (
    Attach,
    Buffer,
    Cancel,
    Delete,
    Error,
    FinishReason,
    Generate,
    ModelInfo,
    ModelInfoRequest,
    Msg,
    Score,
    System,
    Tag,
    Tags,
    Token,
    Upload,
)
from .sampling import TokenId

Role = Literal["gpu", "controller", "state"]
Id = Annotated[int, Meta(ge=0)]

ANY_MODULE = "*"
"""The pattern of a controller worker that runs any uploaded module."""


class LiveRequest(Struct, kw_only=True, omit_defaults=True):
    """A request that a worker still holds when it registers."""

    request: Id
    session: Id
    stream_id: int


class Register(Struct, kw_only=True, omit_defaults=True):
    """``REGISTER``: a worker offers itself. Sent at start and whenever the broker asks for it."""

    name: str
    """Unique among the living workers, stable over reconnections."""
    role: Role
    version: int
    pid: int
    host: str
    capacity: Annotated[int, Meta(ge=1)]
    """Requests that it holds at most, waiting ones included."""
    models: list[ModelInfo] = []
    """Models that are loaded."""
    patterns: list[str] = []
    """Models that it may load on demand: names, with ``*`` and ``?`` as in a shell. Of a controller
    worker: the controllers that it runs, or ``ANY_MODULE``."""
    default: str = ""
    """The model that it takes a request without a model for."""
    live: list[LiveRequest] = []


class Registered(Struct, kw_only=True, omit_defaults=True):
    """``REGISTERED``: the broker's answer."""

    worker: Id
    heartbeat_s: float
    expiry_s: float
    unknown: list[Id] = []
    """Reported live requests that nobody waits for any more: drop them."""


class Heartbeat(Struct, kw_only=True, omit_defaults=True):
    """``HEARTBEAT``: a worker lives. The broker sends its own, empty, as often."""

    requests: int = 0
    step_age_s: float | None = None
    """How long the step in progress has run, in seconds; None between steps. A hung step shows."""
    load: dict[str, float] = {}
    """Gauges for the operator: running, waiting, pages, tokens per second."""


class Reregister(Struct, kw_only=True, omit_defaults=True):
    """``REREGISTER``: the broker does not know this worker (it restarted, or the lease ended)."""

    reason: str


class Drain(Struct, kw_only=True, omit_defaults=True):
    """``DRAIN``: no more requests, please.

    From a worker: it will finish what it has and leave. From the broker: please do that.
    """

    reason: str = ""


class Unregister(Struct, kw_only=True, omit_defaults=True):
    """``UNREGISTER``: a worker leaves now."""

    reason: str = ""


# --- the step between a GPU worker and a controller worker ----------------------------------------
#
# Of a message that one worker sends another, ``Header.address`` names the receiver where it is
# sent (0: the broker chooses) and the sender where it arrives. Bodies are msgpack.


class VocabularyName(Struct, kw_only=True, omit_defaults=True):
    """What a controller must know of a model: its tokenizer, by name, and the size of a mask."""

    fingerprint: str
    """SHA-256 of the tokenizer's canonical JSON; ``TOKENIZER`` asks for it."""
    size: int
    """Tokens that the model can give: a mask has ceil(size / 32) words."""
    eos: list[int]


class Start(Struct, kw_only=True, omit_defaults=True):
    """``START``: the controller of a request is to begin, with sequence 0.

    From a GPU worker; the broker chooses the controller worker and attaches the client's tenant.
    """

    controller: str
    arg: str | dict[str, Any] | list[Any] | None = None
    prompt: list[TokenId]
    n: int = 1
    """Sequences to begin with: sequence 0 is forked into them before its first round."""
    max_tokens: int
    """Tokens that the sequence may have beyond its prompt, fast-forwarded ones included."""
    model: str
    vocabulary: VocabularyName
    ignore_eos: bool = False
    """A sequence does not end with an end-of-sequence token. Without it, it does where its
    controller would just sample on; one that appends, drops, forks or suspends goes on."""


class StepSequence(Struct, array_like=True):
    """What happened to one sequence since its last round."""

    request: Id
    seq: int
    tokens: list[TokenId]
    """Tokens that were sampled: the argument of post_process."""
    ended: FinishReason | None = None
    """The sequence is over: after a last post_process its instance goes."""


class Step(Struct, kw_only=True, omit_defaults=True):
    """``STEP``: one message per controller worker per step carries all its sequences."""

    sequences: list[StepSequence]
    masks: str = ""
    """A file of rows for masks that both workers map; empty: masks come as attachments."""
    rows: int = 0
    row_bytes: int = 0


class StepResult(Struct, array_like=True):
    """What a controller decided: drop, append, and then sample, fork, suspend or stop."""

    request: Id
    seq: int
    then: Literal["sample", "fork", "suspend", "stop", "error"]
    """``fork``: results of its own and of its children follow."""
    backtrack: int = 0
    """Tokens of the sequence to drop, of those that it has; not the one about to be sampled."""
    ff_tokens: list[TokenId] = []
    """Tokens to append after that."""
    row: int | None = None
    """Row of the shared file that holds the mask."""
    attachment: int | None = None
    """Attachment that holds the mask. Neither: every token is allowed."""
    children: list[int] = []
    """``fork``: the ids of the new sequences."""
    logs: str = ""
    storage: list[Any] = []
    """The writes to variables, as AICI's storage commands."""
    error: str | None = None
    code: str | None = None
    """``error``: the code that belongs to it."""
    finish: FinishReason = "controller"
    """``stop``: the reason that the client is told."""


class Result(Struct, kw_only=True, omit_defaults=True):
    """``RESULT``: the answer to ``START`` or ``STEP``; sequences that are late come in a later one.

    A sequence that was suspended comes again, unasked, when it goes on.
    """

    sequences: list[StepResult]
    host: str = ""
    """The machine of the controller worker, by ``machine_id``."""


class Lost(Struct, kw_only=True, omit_defaults=True):
    """``LOST``: the broker tells a GPU worker that these requests have no controller."""

    requests: list[Id]
    code: str
    message: str
    path: str | None = None
    retry_after_s: float | None = None


class End(Struct, kw_only=True, omit_defaults=True):
    """``END``: the broker tells controller and state workers that these requests are over."""

    requests: list[Id]


class TokenizerRequest(Struct, kw_only=True, omit_defaults=True):
    """``TOKENIZER``: a controller worker asks for the tokenizer of this fingerprint."""

    fingerprint: str


class TokenizerAnswer(Struct, kw_only=True, omit_defaults=True):
    """``TOKENIZER_JSON``: the tokenizer is attachment 0, as ``tokenizers`` JSON."""

    fingerprint: str
    error: str | None = None
    """Why there is no attachment."""


# --- variables -----------------------------------------------------------------------------------


class Variable(Struct, array_like=True):
    """``VARIABLE``: one operation of a controller on its request's variables.

    Named by (request, seq, count), so that a repeated one gets the answer it got before.
    """

    request: Id
    seq: int
    count: int
    op: Literal["get", "set", "append"]
    name: str
    value: bytes = b""
    when_version_is: int | None = None
    """Write only where this is the variable's version; 0 means that there is none yet."""


class VariableAnswer(Struct, array_like=True):
    """``VARIABLE_ANSWER``: what the variable is now; ``version`` 0: there is no such variable.

    A write that was made has ``written`` and no value; one whose version did not fit has the
    variable as a ``get`` would have given it.
    """

    request: Id
    seq: int
    count: int
    version: int = 0
    value: bytes | None = None
    written: bool = False
    error: str | None = None


TO_BROKER: dict[bytes, Any] = {
    b"REGISTER": Register,
    b"HEARTBEAT": Heartbeat,
    b"DRAIN": Drain,
    b"UNREGISTER": Unregister,
    b"TOKEN": list[Token],
    b"MSG": Msg,
    b"SYSTEM": System,
    b"ERROR": Error,
    b"BUFFER": Buffer,
    b"START": Start,
    b"STEP": Step,
    b"RESULT": Result,
    b"TOKENIZER": TokenizerRequest,
    b"TOKENIZER_JSON": TokenizerAnswer,
    b"VARIABLE": Variable,
    b"VARIABLE_ANSWER": VariableAnswer,
}
"""What a worker sends: type to body."""

TO_WORKER: dict[bytes, Any] = {
    b"REGISTERED": Registered,
    b"HEARTBEAT": Heartbeat,
    b"REREGISTER": Reregister,
    b"DRAIN": Drain,
    b"GENERATE": Generate,
    b"SCORE": Score,
    b"CANCEL": Cancel,
    b"ATTACH": Attach,
    b"MODEL_INFO": ModelInfoRequest,
    b"UPLOAD": Upload,
    b"TAG": Tag,
    b"TAGS": Tags,
    b"DELETE": Delete,
    b"START": Start,
    b"STEP": Step,
    b"RESULT": Result,
    b"LOST": Lost,
    b"END": End,
    b"TOKENIZER": TokenizerRequest,
    b"TOKENIZER_JSON": TokenizerAnswer,
    b"VARIABLE": Variable,
    b"VARIABLE_ANSWER": VariableAnswer,
}
"""What a worker receives: type to body."""
