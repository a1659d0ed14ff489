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
    """Models that it may load on demand: names, with ``*`` and ``?`` as in a shell."""
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


class StepSequence(Struct, kw_only=True, omit_defaults=True):
    """What happened to one sequence since its last round."""

    request: Id
    seq: int
    tokens: list[TokenId] = []
    """Tokens appended, after dropping ``backtrack``: the argument of post_process."""
    backtrack: int = 0
    prompt: list[TokenId] | None = None
    """In a sequence's first round: the prompt, for init_prompt."""
    controller: str | None = None
    controller_arg: str | dict[str, Any] | None = None
    model: str = ""
    fingerprint: str = ""
    ended: FinishReason | None = None
    """The sequence is over: free its instance."""


class Step(Struct, kw_only=True, omit_defaults=True):
    """``STEP``: one message per controller worker per step carries all its sequences."""

    step: int
    sequences: list[StepSequence]
    slots: int = 0
    """Rows of the shared mask memory named by ``masks``; 0: masks come as attachments."""
    masks: str = ""


class StepResult(Struct, kw_only=True, omit_defaults=True):
    """What a controller decided: drop, append, and then sample, fork, suspend or stop."""

    request: Id
    seq: int
    then: Literal["sample", "fork", "suspend", "stop", "error"]
    backtrack: int = 0
    ff_tokens: list[TokenId] = []
    mask: int | None = None
    """Row of the mask memory, or number of the attachment; None: every token is allowed."""
    children: list[int] = []
    """``fork``: the ids of the new sequences."""
    logs: str = ""
    storage: list[Any] = []
    error: str | None = None


class Result(Struct, kw_only=True, omit_defaults=True):
    """``RESULT``: the answer to ``STEP``; sequences that are late come in a later one."""

    step: int
    sequences: list[StepResult]


class TokenizerRequest(Struct, kw_only=True, omit_defaults=True):
    """``TOKENIZER``: a controller worker asks for the tokenizer of this fingerprint."""

    fingerprint: str


class TokenizerAnswer(Struct, kw_only=True, omit_defaults=True):
    """``TOKENIZER_JSON``: the tokenizer is attachment 0, as ``tokenizers`` JSON."""

    fingerprint: str
    vocab_size: int
    eos_token_ids: list[int]


# --- variables -----------------------------------------------------------------------------------


class Variable(Struct, kw_only=True, omit_defaults=True):
    """``VARIABLE``: one operation of a controller on its request's variables.

    Named by (request, seq, count), so that a repeated one gets the answer it got before.
    """

    request: Id
    seq: int
    count: int
    op: Literal["get", "set", "append", "drop"]
    name: str = ""
    value: bytes = b""
    when_version_is: int | None = None


class VariableAnswer(Struct, kw_only=True, omit_defaults=True):
    """``VARIABLE_ANSWER``: ``version`` 0 means that there is no such variable."""

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
    b"STEP": Step,
    b"RESULT": Result,
    b"TOKENIZER": TokenizerRequest,
    b"TOKENIZER_JSON": TokenizerAnswer,
    b"VARIABLE": Variable,
    b"VARIABLE_ANSWER": VariableAnswer,
}
"""What a worker receives: type to body."""
