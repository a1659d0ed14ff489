"""The messages between the broker and its workers. The messages that the broker forwards from
clients or to clients are in ``messages.py``.

Each message has a header (``header.py``) between its type and its body. The bodies of the messages
here are msgpack.
Sources: the worker side of ZeroMQ's Majordomo (register, heartbeat, disconnect), and the step of
AICI.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from .messages import (
    Attach,
    Buffer,
    Cancel,
    ConstraintEnd,
    Delete,
    Embed,
    Error,
    FinishReason,
    Generate,
    ModelInfo,
    ModelInfoRequest,
    ModelTokenizerRequest,
    Msg,
    Pause,
    PauseMode,
    Period,
    RequestId,
    Score,
    System,
    Tag,
    Tags,
    Token,
    Tool,
    TraceParent,
    UpdateMode,
    Upload,
    WeightsVersion,
)
from .metrics import Series
from .sampling import MAX_SCORED_TEXTS, Distribution, Override, Query, Scores, TokenId

Role = Literal["gpu", "controller", "state", "tool"]
Id = Annotated[int, Meta(ge=0)]

ANY_MODULE = "*"
"""The pattern in ``Register.patterns`` of a controller worker that runs every uploaded module."""


class LiveRequest(Struct, kw_only=True, omit_defaults=True):
    """A running request of a worker that registers."""

    request: Id
    session: Id
    stream_id: int


class ModelState(Struct, kw_only=True, omit_defaults=True):
    """The current weights of a model, and whether the model is paused."""

    model: str
    version: WeightsVersion = 0
    folder: str = ""
    """The folder of the weights; empty for version 0."""
    hashes: dict[str, str] = {}
    """The hash of the current weights (``Span.weights``), for each dtype in which a worker has read
    them. A worker that cannot read the folder receives weights with this hash from another
    worker."""
    paused: PauseMode | None = None


class Register(Struct, kw_only=True, omit_defaults=True):
    """``REGISTER``: registers a worker. Sent by the worker at its start, at the broker's request,
    and when the worker's models, tools or capacity have changed."""

    name: str
    """The worker's name: unique among the running workers, and the same after a reconnection."""
    role: Role
    version: int
    pid: int
    host: str
    capacity: Annotated[int, Meta(ge=1)]
    """Maximum number of requests that may be assigned to the worker, including waiting requests."""
    models: list[ModelInfo] = []
    """Models that are loaded."""
    patterns: list[str] = []
    """Names of the models that the worker loads on demand, with ``*`` and ``?`` as in a shell. For
    a controller worker: the controllers that it runs, or ``ANY_MODULE``."""
    missing_layers: list[str] = []
    """Layers of isolation that the guests of a controller worker lack, with the reasons."""
    default: str = ""
    """The model that the worker uses for requests without a model."""
    tools: list[Tool] = []
    """The functions that a tool worker serves."""
    live: list[LiveRequest] = []
    """The worker's live requests that came from this broker, or from an earlier broker at its
    address."""
    update: bool = False
    """Whether a registered worker changes what it serves. The worker's lease then continues."""
    step_age_s: float | None = None
    """How long the current step has been running, in seconds; None between steps. A worker may
    register while its step hangs."""
    process: Id = 0
    """Random number of the worker's process. Two containers may have the same host name and pid."""
    states: list[ModelState] = []
    """The models of a GPU worker whose weights have changed, or that are paused. A restarted broker
    receives these states from its workers."""
    registration: Id = 0
    """Number, within this process, of the lease that this message begins or updates; 0 if the
    worker does not number its leases."""


class Registered(Struct, kw_only=True, omit_defaults=True):
    """``REGISTERED``: the broker's answer to REGISTER."""

    worker: Id
    heartbeat_s: Period
    expiry_s: Period
    unknown: list[Id] = []
    """Reported live requests that the broker does not know; the worker drops them."""
    wanted: list[Id] = []
    """Reported live requests that continue at this broker, because the broker was restarted and
    adopts them, or because it was waiting for this worker to return. The worker sends a JOURNAL for
    each, before any further message about the request."""
    states: list[ModelState] = []
    """For a GPU worker: the models whose weights have changed, or that are or were paused. The
    worker loads these weights before it runs streams of the model."""
    registration: Id = 0
    """``Register.registration`` of the message that began the lease; 0 if the broker does not send
    this number back."""


class Journal(Struct, kw_only=True, omit_defaults=True):
    """``JOURNAL``: a live or recently ended request of a GPU worker, for a broker that does not
    have all entries of the request.

    The header has the request, its session, and the encoding of the session's bodies. Attachment 0
    is a TOKEN body in msgpack with all entries that were sent for the request. The other
    attachments are the frames of the request: its body and attachments.
    """

    type: Literal["GENERATE", "SCORE"]
    age_s: float = 0.0
    """Seconds since the request arrived at its first broker."""
    ended: bool = False
    """Whether the sent entries include the end of the stream."""
    moves: int = 0
    """How often the stream had moved when it came to this worker. If a worker was cut off and the
    stream continued at another worker, the copy that has moved more often is valid, even if the
    other copy has more entries. The entries of the two copies may be in different orders."""
    claimed: Annotated[int, Meta(ge=0)] = 0
    """How many of ``moves`` the CLAIM has added that this JOURNAL answers. Copies are compared
    without this number, because a CLAIM adds it to stale copies too."""
    gone: bool = False
    """Whether the worker no longer has the request. The message then has no attachments."""
    entries: Annotated[int, Meta(ge=0)] | None = None
    """Number of entries in attachment 0. If None, the worker is of an earlier release, and the
    broker counts the entries."""


class Heartbeat(Struct, kw_only=True, omit_defaults=True):
    """``HEARTBEAT``: renews the lease of a worker. The broker sends an empty HEARTBEAT at the same
    interval."""

    requests: int = 0
    """Number of requests at the worker, from all brokers."""
    elsewhere: Annotated[int, Meta(ge=0)] = 0
    """Number of requests at the worker that came from other brokers."""
    step_age_s: float | None = None
    """How long the current step has been running, in seconds; None between steps."""
    load: dict[str, float] = {}
    """Gauges for the operator by name, for example the number of running requests."""
    metrics: list[Series] = []
    """Counters and histograms since the worker started, for ``STATUS`` to show."""
    sandbox_ms: dict[str, int] = {}
    """CPU time of a controller worker's controllers since the worker started, in milliseconds, by
    the key of the client. Clients without a key are left out."""


class Claim(Struct, kw_only=True, omit_defaults=True):
    """``CLAIM``: the client of a session has come from another broker. Sent by the broker to a GPU
    worker.

    The worker sends a JOURNAL for each live stream of the session, and for each stream that has
    just ended. These streams continue under this broker. CLAIMED follows the last JOURNAL. The
    worker may answer the CLAIMs of several sessions in any order. A CLAIM with session 0 asks for
    no streams; its CLAIMED confirms that the worker has processed all earlier messages except other
    CLAIMs.
    """

    session: Id


class Claimed(Struct, kw_only=True, omit_defaults=True):
    """``CLAIMED``: the answer to CLAIM, after the worker has sent all its streams of the
    session."""

    session: Id


class Released(Struct, kw_only=True, omit_defaults=True):
    """``RELEASED``: the listed requests continue under another broker. Sent by the GPU worker that
    has the requests."""

    requests: list[Id]


class Refused(Struct, kw_only=True, omit_defaults=True):
    """``REFUSED``: a worker has no room for a request or a START, or does not know the controller
    of a START. The header names the request.

    The worker may be full because other brokers have sent it requests that this broker does not
    know yet. The attachments are the body and the attachments of the refused message.
    """

    type: str
    """``START``, or the type of the request."""
    elsewhere: Annotated[int, Meta(ge=0)] = 0
    """Number of requests at the worker that came from other brokers."""
    unknown: str = ""
    """The message of the error ``unknown_controller``, if the worker does not know the controller.
    The broker ends the request with this error, unless a worker that knows the controller may still
    register."""


class Order(Struct, kw_only=True, omit_defaults=True):
    """``ORDER``: one action of PAUSE, RESUME or UPDATE_WEIGHTS. Sent by the broker to a GPU worker,
    which answers with ORDER_DONE.

    ``prepare`` reads and checks weights, while streams run. ``commit`` makes them the model's
    current weights, even if this worker has not prepared them or has not loaded the model. ``drop``
    discards prepared weights.
    """

    number: Id
    action: Literal["prepare", "commit", "drop", "pause", "resume"]
    model: str
    version: WeightsVersion = 0
    folder: str = ""
    shared: str = ""
    size: Id = 0
    sha256: str = ""
    """``folder``, ``shared``, ``size`` and ``sha256`` come from UPDATE_WEIGHTS. If the weights are
    neither in a folder nor in shared memory, the worker requests them with FETCH_WEIGHTS."""
    hashes: dict[str, str] = {}
    """With ``commit``: the hashes of the new weights by dtype, as in ``ModelState.hashes``."""
    update: UpdateMode = "recompute"
    pause: PauseMode = "keep"


class OrderDone(Struct, kw_only=True, omit_defaults=True):
    """``ORDER_DONE``: the answer to ORDER."""

    number: Id
    action: Literal["prepare", "commit", "drop", "pause", "resume"]
    error: str = ""
    """Why the worker could not follow the order; empty if it has followed it."""
    streams: Annotated[int, Meta(ge=0)] = 0
    """Number of this worker's live streams that stopped, were aborted, or continue under the new
    weights."""
    pause_ms: float = 0.0
    """How long this worker stopped its steps to replace the weights, in milliseconds."""
    weights: str = ""
    """The hash of the prepared weights (``Span.weights``)."""
    dtype: str = ""
    """The dtype of the prepared weights. Weights of different dtypes cannot be compared."""


class FetchWeights(Struct, kw_only=True, omit_defaults=True):
    """``FETCH_WEIGHTS``: a GPU worker requests a part of the weights of a model. The broker passes
    the message to a GPU worker that has these weights, which answers with WEIGHTS_PART. With
    ``order``, the broker answers when the operator has sent the part.

    The worker requests the next part when it has received the previous part, so that at most one
    part waits in the queues to the worker.
    """

    model: str
    weights: Annotated[str, Meta(min_length=1)]
    """The hash of the weights (``Span.weights``), or ``Order.sha256``."""
    order: Id = 0
    """``Order.number`` of the order that the worker follows; 0 for the current weights."""
    offset: Id = 0
    """The first byte of the part in a safetensors file of the weights. All workers with these
    weights make equal files."""
    turn: Id = 0
    """Selects one of the workers that have the weights. The requesting worker raises this number
    when a part does not arrive."""


class WeightsPart(Struct, kw_only=True, omit_defaults=True):
    """``WEIGHTS_PART``: the answer to FETCH_WEIGHTS. Attachment 0 has the bytes of the part."""

    model: str
    weights: str
    offset: Id = 0
    size: Id = 0
    """Number of bytes of the whole file."""
    error: str = ""
    """The reason why the attachment is missing."""


class Pages(Struct, kw_only=True, omit_defaults=True):
    """``PAGES``: the content of a GPU worker's KV caches has changed (``pages.py``).

    Attachment 0 has the keys of added pages, attachment 1 has the keys of removed pages, 8 bytes
    each.
    """

    reset: bool = False
    """Whether the added pages are all pages of the worker, as in the first message after a
    registration."""


class Reregister(Struct, kw_only=True, omit_defaults=True):
    """``REREGISTER``: the worker must register again, for example because the broker was restarted
    or the worker's lease has expired."""

    reason: str


class Drain(Struct, kw_only=True, omit_defaults=True):
    """``DRAIN``: the worker gets no more requests.

    A worker that sends this message finishes its requests and then unregisters. If the broker sends
    the message, it asks the worker to drain.
    """

    reason: str = ""
    successor: bool = False
    """Whether another process takes the worker's place as soon as the worker has left. The worker
    then does not have to finish its streams first."""
    system_ends: bool = False
    """Whether all workers of the system on this machine are about to drain. These workers then
    cannot take the streams of this worker. ``successor`` is false."""


class Handover(Struct, kw_only=True, omit_defaults=True):
    """``HANDOVER``: other workers, or a successor, can take all requests of this draining worker.

    Sent by the broker. The worker ends its current step, sends the results, and unregisters. Then
    the worker's streams move.
    """


class Unregister(Struct, kw_only=True, omit_defaults=True):
    """``UNREGISTER``: a worker leaves the bus."""

    reason: str = ""


# --- the step between a GPU worker and a controller worker ----------------------------------------
#
# In a message from one worker to another, ``Header.address`` is the receiver when the message is
# sent (0 if the broker chooses), and the sender when the message arrives. Bodies are msgpack.


class VocabularyName(Struct, kw_only=True, omit_defaults=True):
    """The part of a model that a controller needs: the fingerprint of the tokenizer, and the size
    of a mask."""

    fingerprint: str
    """SHA-256 of the tokenizer's canonical JSON, which ``FETCH_TOKENIZER`` requests."""
    size: int
    """Number of logits of the model: a mask has ceil(size / 32) words."""
    eos: list[int]
    special: dict[str, int] = {}
    """The ids of special tokens, by role (``SpecialToken.role``). GPU workers of earlier versions
    do not send these ids."""


class Replay(Struct, array_like=True):
    """The history of a sequence whose controller is started again at another worker.

    The controller worker runs all rounds again with the same inputs. Variable operations get the
    same answers as the first time. The controller worker then sends, in order, all results after
    the sequence's last sampled token or its last fork, whichever is later. The GPU worker has
    possibly not applied these results. Both the fork that created the sequence and the forks in
    ``forks`` count. The first of these results has all logs and writes since the last sampled
    token. The GPU worker stores how many of these logs and writes the client has received.
    """

    seq: Id
    tokens: list[TokenId]
    """The tokens that were sampled, in order; one round followed each of them. Sampled tokens that
    the controller dropped later are included. Tokens that the controller appended are not included,
    because the replay appends them again. The placeholder 0 stands for an answer to ``look`` or
    ``score``."""
    forks: list[int] = []
    """The sequences that the forks of this sequence created, in order. If the replay forks more
    often, the further forks are new."""
    ended: bool = False
    """Whether the sequence has ended. An ended sequence is replayed only for its forks, and its
    results are not sent."""
    last: bool = False
    """Whether the last of ``tokens`` ended the sequence (by its length or a stop string). After
    that token, only ``post_process`` was called, once."""
    distributions: dict[Id, Distribution] = {}
    """The distributions that the sequence's controller received, by the index in ``tokens`` of the
    sampled token. The answer to ``look`` has the index of its placeholder, and
    ``Distribution.rank`` 0."""
    wakes: dict[Id, int] = {}
    """How often the sequence was woken from suspension before a token was sampled, by the token's
    index in ``tokens``."""
    scores: dict[Id, Scores] = {}
    """The scores that the sequence's controller received, by the index of their placeholder in
    ``tokens``."""
    logprobs: list[float] = []
    """The log-probability of each of ``tokens``, as in ``StepSequence.logprobs``; 0 for a
    placeholder. GPU workers of earlier releases do not send this list."""


class Start(Struct, kw_only=True, omit_defaults=True):
    """``START``: start the controller of a request, with sequence 0.

    Sent by a GPU worker. The broker chooses the controller worker, and attaches the tenant and the
    session of the request.
    """

    controller: str
    arg: str | dict[str, Any] | list[Any] | None = None
    prompt: list[TokenId]
    n: int = 1
    """Number of sequences. Sequence 0 is forked into this number of sequences before its first
    round."""
    healed: TokenId | None = None
    """The token that was removed from the end of the prompt; it is not in ``prompt``."""
    max_tokens: int
    """Maximum number of tokens of the sequence after its prompt, including fast-forwarded
    tokens."""
    model: str
    vocabulary: VocabularyName
    ignore_eos: bool = False
    """Whether sequences continue after an end-of-sequence token. Otherwise such a token ends its
    sequence, unless the controller appends, drops, forks or suspends."""
    inspect: bool = False
    """Whether each result has the duration of its round."""
    trace: TraceParent = ""
    request_id: RequestId = ""
    """The trace and the request id, as in ``GENERATE``."""
    replay: list[Replay] = []
    """The sequences of a request whose controller was started before; parents come before their
    forks. No other sequence exists yet."""
    attempt: Annotated[int, Meta(ge=0)] = 0
    """A number that the GPU worker gives to each START that starts a controller again, so that it
    can ignore decisions for earlier attempts; 0 for the first START of a request."""
    reads_usual: bool = False
    """Whether the GPU worker reads ``Result.usual``."""
    takes_runs: bool = False
    """Whether the GPU worker reads ``StepResult.run``."""


class StepSequence(Struct, array_like=True):
    """The events of one sequence since its last round, in a ``STEP``."""

    request: Id
    seq: int
    tokens: list[TokenId]
    """The sampled tokens: the argument of ``post_process``. There are several tokens only after a
    run (``StepResult.run``) or a draft. After a draft, each token but the last was sampled under
    one of the controller's masks along the draft."""
    ended: FinishReason | None = None
    """The finish reason if the sequence has finished. The sequence's controller then gets a last
    ``post_process`` and is dropped."""
    stop: str = ""
    """The stop string that ended the sequence. The sequence's text ends before the first occurrence
    of this string."""
    draft: list[TokenId] = []
    """Tokens that are likely to follow, for a controller that takes drafts. If the controller
    decides to sample, its result also has the masks along the draft."""
    distributions: list[Distribution] = []
    """The distributions that ``tokens`` were sampled from. Empty if the decision before the tokens
    did not have a query. After the action ``look``, there is one distribution, and there are no
    tokens."""
    scores: Scores = []
    """The answer to the action ``score``. ``tokens`` is then empty."""
    logprobs: list[float] = []
    """The natural log-probability of each of ``tokens`` under the model's own distribution, if the
    decision before the tokens had ``StepResult.logprobs``. Minus infinity is sent as the lowest
    float32."""


class Step(Struct, kw_only=True, omit_defaults=True):
    """``STEP``: the sequences that a controller worker steers, in one message for each step."""

    sequences: list[StepSequence]
    masks: str = ""
    """The file of mask rows that both workers map into memory; empty if masks are attachments."""
    rows: int = 0
    row_bytes: int = 0
    bias_bytes: int = 0
    """Bytes of a row's bias; 0 if biases are attachments. The biases of all rows follow the
    masks."""


class Pin(Struct, array_like=True, frozen=True):
    """A request to keep the blocks of a sequence in the KV cache while there is room."""

    seconds: Annotated[float, Meta(ge=0)]
    owner: Id
    """A number of the tenant. A GPU worker bounds the pinned blocks of each owner."""


class StepResult(Struct, array_like=True):
    """The decision of a controller: drop tokens, append tokens, and then sample, score texts, fork,
    suspend or stop.

    GPU workers of earlier releases ignore the bias, ``prompt`` and ``pin``. Programs that use them
    need GPU workers of this release.
    """

    request: Id
    seq: int
    action: Literal["sample", "fork", "suspend", "stop", "error", "score", "look"]
    """``fork``: the results of the sequence and of its children follow. ``score``: a STEP with the
    scores of ``texts`` follows, without a token. ``look``: a STEP with the answer to ``query``
    follows, without a token. A GPU worker of an earlier release ends the sequence with an error if
    it does not know the action."""
    backtrack: int = 0
    """Number of tokens to drop from the end of the sequence, not counting the token that is about
    to be sampled."""
    ff_tokens: list[TokenId] = []
    """Tokens to append after the drop."""
    row: int | None = None
    """The mask's row in the shared file (``Step.masks``)."""
    attachment: int | None = None
    """The index of the attachment that is the mask. With neither ``row`` nor ``attachment``, every
    token is allowed."""
    children: list[int] = []
    """``fork``: the numbers (``seq``) of the new sequences."""
    logs: str = ""
    storage: list[Any] = []
    """The writes to variables, as AICI's storage commands."""
    error: str | None = None
    code: str | None = None
    """``error``: the code of the error."""
    finish: FinishReason = "controller"
    """``stop``: the finish reason that the client receives."""
    constraint: ConstraintEnd | None = None
    """From a built-in constraint, in its first result and with ``stop``: how the text would end if
    the sequence ended there."""
    round_us: int = 0
    """With ``Start.inspect``: the time of the round, in microseconds."""
    takes_drafts: bool = False
    """In the first result: whether the controller computes masks along drafts."""
    along: list[int] = []
    """``sample``, in answer to a draft: the masks after the first draft token, after the first two,
    and so on. They end before the first position where the controller would do more than sample.
    The numbers are rows, or attachments if the result's own mask is an attachment."""
    bias_row: int | None = None
    """The bias's row in the shared file. The row begins with a u32, the number of pairs that
    follow. A pair is a token id (u32) and its bias (float32); the ids ascend. If the number is 0,
    the biases of all tokens follow (float32 each)."""
    bias_attachment: int | None = None
    """The index of the attachment that is the bias, in the same form. With neither ``bias_row`` nor
    ``bias_attachment``, the result has no bias."""
    query: Query | None = None
    """``sample`` and ``look``: the question about the distribution of the next token. A GPU worker
    of an earlier release does not answer."""
    override: Override | None = None
    """``sample``: sampling parameters for the next token, in place of the request's."""
    wakes: int = 0
    """How often the sequence has been woken since its last sampled token."""
    biases_along: list[int | None] = []
    """The biases that belong to the masks of ``along``, in the same order, as rows or attachments.
    An element is None if its position has no bias. The list is empty if no position along the draft
    has a bias."""
    messages: list[str] = []
    """The texts that the program has sent to its client."""
    texts: Annotated[list[list[TokenId]], Meta(max_length=MAX_SCORED_TEXTS)] = []
    """``score``: the tokens of the texts. Each text follows the sequence directly."""
    prompt: list[TokenId] = []
    """The prompt with which the sequence begins anew: all its tokens are dropped, with those of its
    former prompt. ``ff_tokens`` follow the prompt. ``backtrack`` is then 0."""
    pin: Pin | None = None
    """Pins the blocks of the sequence, as far as they are computed."""
    awaits: int = 0
    """``suspend``: the number of the input that the program waits for, or 0."""
    run: int = 1
    """``sample``: the maximum number of tokens that are sampled before the next STEP. In a *run* of
    more than one token, every token is allowed, and the mask has the tokens that end the run. Only
    for requests whose START has ``takes_runs``."""
    logprobs: bool = False
    """``sample``: whether the next STEP has the log-probabilities of its tokens. A GPU worker of an
    earlier release does not send them."""

    @property
    def biased(self) -> bool:
        """Whether the result has a bias."""
        return self.bias_row is not None or self.bias_attachment is not None

    @property
    def has_options(self) -> bool:
        """Whether the result has a query or an override, or asks for log-probabilities."""
        return self.query is not None or self.override is not None or self.logprobs


class Result(Struct, kw_only=True, omit_defaults=True):
    """``RESULT``: the answer to ``START`` or ``STEP``. The results of rounds that are not finished
    follow in a later message.

    When a suspended sequence resumes, the controller worker sends its result without a STEP.
    """

    sequences: list[StepResult]
    usual: list[int] = []
    """A short form of the most frequent results, for requests whose START has ``reads_usual``. Each
    result is three numbers: the request, the sequence and ``StepResult.row``. Its action is
    ``sample``, and all other fields have their defaults. If a round forks, its results are in
    ``sequences``, because their order matters."""
    host: str = ""
    """The id of the controller worker's machine (``machine_id``)."""
    attempts: dict[Id, int] = {}
    """``Start.attempt`` of each request that was started again and has its first result in this
    message, by the request's id. Results of the request in earlier messages belong to an earlier
    attempt."""


class Lost(Struct, kw_only=True, omit_defaults=True):
    """``LOST``: the controllers of the listed requests are lost. Sent by the broker to a GPU
    worker.

    With the code ``worker_lost``, the GPU worker starts the controllers again at another controller
    worker.
    With any other code, the controllers cannot run on any worker, and the streams end with this
    error.
    """

    requests: list[Id]
    code: str
    message: str
    path: str | None = None
    retry_after_s: Pause | None = None
    worker: str = ""
    """With ``worker_lost``: the name of the controller worker that ran the controllers."""


class End(Struct, kw_only=True, omit_defaults=True):
    """``END``: these requests have ended. Sent by the broker to controller and state workers."""

    requests: list[Id]
    elsewhere: bool = False
    """To a state worker: whether the requests have not ended, but continue under another broker."""
    detached: bool = False
    """To a state worker: whether the requests' client had no connection to this broker. If several
    brokers run, the requests may be copies of requests that continue under another broker."""


class FetchTokenizer(Struct, kw_only=True, omit_defaults=True):
    """``FETCH_TOKENIZER``: a controller worker requests the tokenizer of this fingerprint."""

    fingerprint: str


class TokenizerAnswer(Struct, kw_only=True, omit_defaults=True):
    """``TOKENIZER_JSON``: the tokenizer is attachment 0, as ``tokenizers`` JSON."""

    fingerprint: str
    error: str | None = None
    """The reason why the attachment is missing."""


# --- variables -----------------------------------------------------------------------------------


class Variable(Struct, array_like=True):
    """``VARIABLE``: one operation of a controller on its request's variables or inputs.

    An operation is identified by (request, lineage, count), so that a repeated operation gets the
    same answer. ``give`` comes from the broker and stores the client's input number ``count``.
    ``take`` returns the next input, with its number as the version. If no input waits, the version
    is 0. ``save`` and ``open`` write and read a context of the request's tenant. If the context
    does not exist, the answer to ``open`` has version 0.
    """

    request: Id
    lineage: int
    """The lineage of the sequence: 0 for sequence 0, else a hash of the forks that led to it. Each
    sequence has a different lineage."""
    count: int
    """The number of the operation in its sequence, from 1."""
    op: Literal["get", "set", "append", "give", "take", "save", "open"]
    name: str
    value: bytes = b""
    when_version_is: int | None = None
    """Write only if the variable has this version; 0 stands for a variable that does not exist. The
    state worker's log also uses the field: an ``open`` that was refused has the number of bytes of
    the refused context."""
    place: int | None = None
    """The number of operations of the request that come before this one. The operation is applied
    only if exactly these have been applied. It is answered without a value, because its sender has
    answered it from a copy of the request's variables. None: the operation is applied in any case,
    and answered in full."""


class VariableAnswer(Struct, array_like=True):
    """``VARIABLE_ANSWER``: the variable after the operation. If ``version`` is 0, the variable does
    not exist.

    The answer to an applied write has ``written`` and no value. The answer to a write whose version
    did not match has the version and value of a ``get``.
    """

    request: Id
    lineage: int
    count: int
    version: int = 0
    value: bytes | None = None
    written: bool = False
    error: str | None = None
    repeated: bool = False
    """Whether the operation was done before, so that this message repeats its first answer."""
    again: bool = False
    """With ``error``: whether the operation failed for a temporary reason, such as a full disk. It
    may then succeed if it is sent again."""
    first: bool = False
    """Whether this is the first operation of its request, apart from the inputs that the client has
    given."""


class Inputs(Struct, kw_only=True, omit_defaults=True):
    """``INPUTS``: the request of the header has a new input. Sent by the broker to the controller
    worker of the request when the state worker has stored the input."""

    number: int
    """The number of the input."""


# --- tools ---------------------------------------------------------------------------------------

MAX_ARGUMENT_BYTES = 64 * 1024
MAX_RESULT_BYTES = 128 * 1024
"""Maximum bytes of the arguments, and of the result, of a call. A result is stored as a variable of
its request."""


class Call(Struct, array_like=True):
    """``CALL``: a program of a request calls a tool.

    Sent by a controller worker. The broker chooses the tool worker. A call is identified by
    (request, lineage, count), and is made at most once.
    """

    request: Id
    lineage: int
    """The lineage of the sequence that calls, as in ``Variable``."""
    count: int
    """The ``count`` of the operation on variables that recorded the call."""
    tool: str
    arguments: bytes = b""
    """A JSON object: the arguments by name."""
    again: bool = False
    """Whether an earlier attempt of the request may have sent the call. The call is then not made
    again. The tool worker that has received the call sends the answer now, or when the function
    returns."""
    owner: str = ""
    """The client whose share of the tool worker's threads includes the call. The broker writes this
    field and ``user``. A broker of an earlier release leaves both empty."""
    user: str = ""
    """The user of the client, if one session serves several users; otherwise empty."""


CALL_TOOL = "call_tool"
"""The name of the built-in program that makes one call. The program's argument is the JSON of
``ToolCall``. The program sends the JSON of ``ToolAnswer`` to its client, in one or several
messages, and stops."""


class ToolCall(Struct):
    """The argument of the program ``CALL_TOOL``."""

    tool: str
    arguments: Raw
    """A JSON object: the arguments by name."""


class ToolAnswer(Struct):
    """The answer of a tool, as JSON: a value, or an error and its code."""

    value: Raw = Raw(b"null")
    error: str | None = None
    code: str = ""


class CallAnswer(Struct, array_like=True):
    """``CALL_ANSWER``: the result of a tool, as JSON, or the error of the call."""

    request: Id
    lineage: int
    count: int
    value: bytes = b""
    error: str | None = None
    code: str = ""
    """With ``error``: the code of the error."""


# --- modules -------------------------------------------------------------------------------------
# The state worker has the table of a tenant, which lists the tenant's modules and tags. The
# controller workers that have used a module store its bytes. Messages about modules do not name a
# request.


class ModuleTable(Struct, array_like=True):
    """``MODULE_TABLE``: reads or replaces the table of a tenant. Sent to the state worker, which
    does not interpret the table.

    The table is replaced only if ``known`` is its current version (compare-and-set).
    """

    id: Id
    """Identifies the operation. The answer has the same id, and a replacement that is sent again
    with the same id is done once."""
    tenant: str
    known: int = 0
    """The version that the sender has; 0 if the sender does not have a version, or if the table
    does not exist yet."""
    content: bytes | None = None
    """The new content; None if the operation only reads the table."""


class ModuleTableAnswer(Struct, array_like=True):
    """``MODULE_TABLE_ANSWER``: the table after the operation. If ``version`` is 0, the tenant does
    not have a table."""

    id: Id
    version: int = 0
    content: bytes | None = None
    """The content; None if the sender has this version, or has just written it."""
    written: bool = False
    error: str | None = None
    """The reason why the operation was not done; the reason is temporary."""


class FetchModule(Struct, kw_only=True, omit_defaults=True):
    """``FETCH_MODULE``: a controller worker needs the bytes of a module.

    If the header has no address, the broker sends the message to all other workers that run
    modules. Each worker that has the module reports this, without the bytes. Then the message is
    sent again, to the address of one of these workers, which answers with the bytes.
    """

    module: str
    """The id of the module: SHA-256 of its bytes, hexadecimal."""
    send: bool = False
    """Whether the receiver sends the bytes. If false, the receiver only reports that it has the
    module."""


class ModuleBytes(Struct, kw_only=True, omit_defaults=True):
    """``MODULE_BYTES``: the sender, a controller worker, has the bytes of this module. They are
    attachment 0 if ``FetchModule.send`` was true."""

    module: str


_BETWEEN_WORKERS: dict[bytes, Any] = {
    b"START": Start,
    b"STEP": Step,
    b"RESULT": Result,
    b"FETCH_TOKENIZER": FetchTokenizer,
    b"TOKENIZER_JSON": TokenizerAnswer,
    b"VARIABLE": Variable,
    b"VARIABLE_ANSWER": VariableAnswer,
    b"CALL": Call,
    b"CALL_ANSWER": CallAnswer,
    b"MODULE_TABLE": ModuleTable,
    b"MODULE_TABLE_ANSWER": ModuleTableAnswer,
    b"FETCH_MODULE": FetchModule,
    b"MODULE_BYTES": ModuleBytes,
    b"FETCH_WEIGHTS": FetchWeights,
    b"WEIGHTS_PART": WeightsPart,
}
"""The messages that the broker forwards from one worker to another."""

TO_BROKER: dict[bytes, Any] = {
    b"REGISTER": Register,
    b"HEARTBEAT": Heartbeat,
    b"PAGES": Pages,
    b"DRAIN": Drain,
    b"UNREGISTER": Unregister,
    b"JOURNAL": Journal,
    b"CLAIMED": Claimed,
    b"RELEASED": Released,
    b"REFUSED": Refused,
    b"ORDER_DONE": OrderDone,
    b"TOKEN": list[Token],
    b"MSG": Msg,
    b"SYSTEM": System,
    b"ERROR": Error,
    b"BUFFER": Buffer,
    **_BETWEEN_WORKERS,
}
"""The messages that a worker sends: the type of the body, by message type."""

TO_WORKER: dict[bytes, Any] = {
    b"REGISTERED": Registered,
    b"HEARTBEAT": Heartbeat,
    b"REREGISTER": Reregister,
    b"DRAIN": Drain,
    b"HANDOVER": Handover,
    b"CLAIM": Claim,
    b"ORDER": Order,
    b"GENERATE": Generate,
    b"SCORE": Score,
    b"CANCEL": Cancel,
    b"ATTACH": Attach,
    b"MODEL_INFO": ModelInfoRequest,
    b"TOKENIZER": ModelTokenizerRequest,
    b"EMBED": Embed,
    b"UPLOAD": Upload,
    b"TAG": Tag,
    b"TAGS": Tags,
    b"DELETE": Delete,
    b"LOST": Lost,
    b"END": End,
    b"INPUTS": Inputs,
    **_BETWEEN_WORKERS,
}
"""The messages that a worker receives: the type of the body, by message type."""
