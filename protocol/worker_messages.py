"""The messages between the broker and its workers. Messages that the broker forwards between a
client and a worker are in ``messages.py``.

Each message has a header (``header.py``) between its type and its body. The bodies of the messages
in this module are msgpack. Sources: the worker side of ZeroMQ's Majordomo (register, heartbeat,
disconnect), and the step of AICI.
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
"""A controller worker that runs every uploaded module has this pattern in ``Register.patterns``."""


class LiveRequest(Struct, kw_only=True, omit_defaults=True):
    """A running request that a worker reports when it registers."""

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
    """The hash of the current weights (``Span.weights``), by dtype, for each dtype in which a
    worker has read the weights. A worker that cannot read the folder receives weights with this
    hash from another worker."""
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
    """Whether the worker is already registered, and only changes the models, tools or capacity that
    it offers. Its lease then continues."""
    step_age_s: float | None = None
    """Seconds for which the current step has been running; None between steps. A worker may
    register while its step hangs."""
    process: Id = 0
    """A random number that identifies the worker's process. Host name and pid do not suffice,
    because they may be the same in two containers."""
    states: list[ModelState] = []
    """From a GPU worker: the states of its models that are paused or whose weights have changed. A
    restarted broker receives these states from its workers."""
    registration: Id = 0
    """The number of the lease that this message begins or updates. A worker numbers its leases from
    1; a worker of an earlier release sends 0."""
    brokers: Annotated[int, Meta(ge=1)] = 1
    """From a GPU worker: the number of brokers of the worker. A worker of an earlier release does
    not send it."""


class Registered(Struct, kw_only=True, omit_defaults=True):
    """``REGISTERED``: the broker's answer to REGISTER."""

    worker: Id
    heartbeat_s: Period
    expiry_s: Period
    unknown: list[Id] = []
    """Reported live requests that the broker does not know; the worker drops them."""
    wanted: list[Id] = []
    """Reported live requests that continue at this broker. The broker adopts them after a restart,
    or they have waited for this worker to return. For each of them, the worker sends a JOURNAL
    before any further message about the request."""
    states: list[ModelState] = []
    """For a GPU worker: the states of the models whose weights have changed, or that are or were
    paused. The worker loads the current weights of a model before it runs streams of the model."""
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
    """Seconds since the request arrived at the first broker that had it."""
    ended: bool = False
    """Whether the sent entries include the end of the stream."""
    moves: int = 0
    """How often the stream had moved when it came to this worker. If a worker was cut off and the
    stream has continued at another worker, there are two copies. The copy that has moved more often
    is valid, even if the other copy has more entries. The two copies may order their entries
    differently."""
    claimed: Annotated[int, Meta(ge=0)] = 0
    """If this JOURNAL answers a CLAIM, the number that the CLAIM has added to ``moves``. Copies are
    compared without this number, because a CLAIM adds it to stale copies too."""
    gone: bool = False
    """Whether the worker does not have the request any more. The message then has no
    attachments."""
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

    The worker sends a JOURNAL for each live stream of the session, and for each stream of the
    session that has just ended. From then on, these streams belong to this broker. CLAIMED follows
    the last JOURNAL. The worker may answer the CLAIMs of several sessions in any order. A CLAIM
    with session 0 does not request streams. The answer to it confirms that the worker has processed
    all earlier messages except other CLAIMs.
    """

    session: Id


class Claimed(Struct, kw_only=True, omit_defaults=True):
    """``CLAIMED``: the answer to CLAIM, after the JOURNALs of all of the worker's streams of the
    session."""

    session: Id


class Released(Struct, kw_only=True, omit_defaults=True):
    """``RELEASED``: the listed requests continue under another broker. Sent by the GPU worker that
    has the requests."""

    requests: list[Id]


class Refused(Struct, kw_only=True, omit_defaults=True):
    """``REFUSED``: a worker has no room for a request or a START, or does not know the controller
    of a START. The header names the request.

    Requests from other brokers may have filled the worker before this broker was notified of them.
    The attachments are the body and the attachments of the refused message.
    """

    type: str
    """``START``, or the type of the request."""
    elsewhere: Annotated[int, Meta(ge=0)] = 0
    """Number of requests at the worker that came from other brokers."""
    unknown: str = ""
    """If the worker does not serve the controller: the message of the error ``unknown_controller``.
    The broker ends the request with this error, unless a worker that serves the controller may
    still register."""


class Order(Struct, kw_only=True, omit_defaults=True):
    """``ORDER``: one action of PAUSE, RESUME or UPDATE_WEIGHTS. Sent by the broker to a GPU worker,
    which answers with ORDER_DONE.

    ``prepare``: the worker reads and checks new weights, while streams run. ``commit``: the new
    weights become the model's current weights, even if this worker has not prepared them or has not
    loaded the model. ``drop``: the worker discards prepared weights.
    """

    number: Id
    action: Literal["prepare", "commit", "drop", "pause", "resume"]
    model: str
    version: WeightsVersion = 0
    folder: str = ""
    shared: str = ""
    size: Id = 0
    sha256: str = ""
    """``folder``, ``shared``, ``size`` and ``sha256`` are copied from UPDATE_WEIGHTS. If the
    weights are neither in a folder nor in shared memory, the worker requests them with
    FETCH_WEIGHTS."""
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
    the message to a GPU worker that has these weights, and this worker answers with WEIGHTS_PART.
    If ``order`` is given, the operator sends the weights, and the broker answers when it has
    received the part.

    The worker requests the next part when it has received the previous part, so that at most one
    part waits in the queues to the worker.
    """

    model: str
    weights: Annotated[str, Meta(min_length=1)]
    """The hash of the weights (``Span.weights``), or ``Order.sha256``."""
    order: Id = 0
    """``Order.number`` of the order that the worker follows; 0 for the current weights."""
    offset: Id = 0
    """The offset of the part in a safetensors file of the weights. All workers with these weights
    make equal files."""
    turn: Id = 0
    """Selects one of the workers that have the weights. If a part does not arrive, the requesting
    worker increases this number."""


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
    """Whether the worker has only the added pages, and none that it reported before. True in the
    first message after a registration."""


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
    """Whether another process takes the worker's place as soon as the worker has left. If so, the
    worker does not have to finish its streams first."""
    system_ends: bool = False
    """Whether all workers of the system on this machine are about to drain. They then cannot take
    the streams of this worker. ``successor`` is false in this case."""


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
# In a message from one worker to another, ``Header.address`` is the id of the receiver (0 if the
# broker chooses the receiver). The broker replaces it by the id of the sender. Bodies are msgpack.


class VocabularyName(Struct, kw_only=True, omit_defaults=True):
    """The properties of a model that a controller needs: the fingerprint of the tokenizer, the size
    of a mask, and the special tokens."""

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

    The controller worker runs all rounds again with the same inputs. Operations on variables get
    the same answers as the first time. Then the controller worker sends the results that the GPU
    worker may not have applied yet. These are, in order, all results after the sequence's last
    sampled token or its last fork, whichever is later. The fork that created the sequence counts as
    a fork too. The first of these results has all logs and writes since the last sampled token. The
    GPU worker has stored how many of these logs and writes the client has received.
    """

    seq: Id
    tokens: list[TokenId]
    """The tokens that were sampled, in order. One round followed each of them. Sampled tokens that
    the controller dropped later are included. Tokens that the controller appended are not, because
    the replay appends them again. An answer to ``look`` or ``score`` has the placeholder 0."""
    forks: list[int] = []
    """The sequences that forks of this sequence have created, in order. If the replay forks more
    often, the additional forks create new sequences."""
    ended: bool = False
    """Whether the sequence has ended. An ended sequence is replayed only because of its forks, and
    its results are not sent."""
    last: bool = False
    """Whether the last of ``tokens`` ended the sequence (by a length limit or a stop string). After
    this token, ``post_process`` was called once, and no other call followed."""
    distributions: dict[Id, Distribution] = {}
    """The distributions that the sequence's controller received. The key is the index of the
    sampled token in ``tokens``; for an answer to ``look``, the index of its placeholder."""
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
    """Number of sequences: before its first round, sequence 0 is forked into this number of
    sequences."""
    healed: TokenId | None = None
    """The token that was removed from the end of the prompt; it is not in ``prompt``."""
    max_tokens: int
    """Maximum number of tokens of the sequence after its prompt, including fast-forwarded
    tokens."""
    model: str
    vocabulary: VocabularyName
    ignore_eos: bool = False
    """Whether sequences continue after an end-of-sequence token. If false, such a token ends its
    sequence, unless the controller then appends, drops, forks or suspends."""
    inspect: bool = False
    """Whether each result has the duration of its round."""
    trace: TraceParent = ""
    request_id: RequestId = ""
    """The trace and the request id, as in ``GENERATE``."""
    replay: list[Replay] = []
    """If the request's controller was started before: the histories of all its sequences, each
    parent before its forks. Otherwise empty."""
    attempt: Annotated[int, Meta(ge=0)] = 0
    """The number of this attempt: 0 for the first START of a request. For each START that starts
    the controller again, the GPU worker chooses another number, so that it can ignore decisions of
    earlier attempts."""
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
    run (``StepResult.run``) or a draft. After a draft, the first token was sampled under the mask
    of the controller's result, and each later token under one of the masks in
    ``StepResult.along``."""
    ended: FinishReason | None = None
    """The finish reason if the sequence has finished. The sequence's controller then gets a last
    ``post_process`` and is dropped."""
    stop: str = ""
    """The stop string that ended the sequence. The sequence's text ends before the first occurrence
    of this string."""
    draft: list[TokenId] = []
    """Tokens that are likely to follow, for a controller that takes drafts. If the controller
    decides to sample, its result also has a mask for each position of the draft
    (``StepResult.along``)."""
    distributions: list[Distribution] = []
    """The distributions that ``tokens`` were sampled from. Empty if the decision before these
    tokens did not have a query. After the action ``look``, there is one distribution and no
    token."""
    scores: Scores = []
    """The answer to the action ``score``. ``tokens`` is then empty."""
    logprobs: list[float] = []
    """The natural log-probability of each of ``tokens`` under the model's own distribution, if the
    decision before these tokens had ``StepResult.logprobs``. Minus infinity is sent as the lowest
    float32."""


class Step(Struct, kw_only=True, omit_defaults=True):
    """``STEP``: the events of the sequences that a controller worker steers. One message for each
    step."""

    sequences: list[StepSequence]
    masks: str = ""
    """The file of mask rows that both workers map into memory; empty if masks are attachments."""
    rows: int = 0
    row_bytes: int = 0
    bias_bytes: int = 0
    """Bytes of a row's bias; 0 if biases are attachments. The biases of all rows follow the
    masks."""


class Pin(Struct, array_like=True, frozen=True):
    """Asks the GPU worker to keep the blocks of a sequence in the KV cache as long as there is
    room."""

    seconds: Annotated[float, Meta(ge=0)]
    owner: Id
    """A number of the tenant. A GPU worker bounds the pinned blocks of each owner."""


class StepResult(Struct, array_like=True):
    """The decision of a controller: first drop tokens, then append tokens, and then sample, score
    texts, fork, suspend or stop.

    GPU workers of earlier releases ignore the bias, ``prompt`` and ``pin``. Programs that use them
    need GPU workers of this release.
    """

    request: Id
    seq: int
    action: Literal["sample", "fork", "suspend", "stop", "error", "score", "look"]
    """After ``fork``, the results of the sequence and of its children follow. The GPU worker
    answers ``score`` with a STEP that has the scores of ``texts`` and no token. It answers ``look``
    with a STEP that has the answer to ``query`` and no token. A GPU worker of an earlier release
    that does not know the action ends the sequence with an error."""
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
    """With ``fork``: the numbers (``seq``) of the new sequences."""
    logs: str = ""
    storage: list[Any] = []
    """The writes to variables, as AICI's storage commands."""
    error: str | None = None
    code: str | None = None
    """``error``: the code of the error."""
    finish: FinishReason = "controller"
    """``stop``: the finish reason that the client receives."""
    constraint: ConstraintEnd | None = None
    """From a built-in constraint: how the text would end if the sequence ended at this point.
    Present in the first result, and with ``stop``."""
    round_us: int = 0
    """With ``Start.inspect``: the time of the round, in microseconds."""
    takes_drafts: bool = False
    """In the first result: whether the controller computes masks along drafts."""
    along: list[int] = []
    """With ``sample``, in answer to a draft: the masks after the first draft token, after the first
    two, and so on. They end before the first position at which the controller would do more than
    sample. The numbers are rows of the shared file or, if the result's own mask is an attachment,
    indices of attachments."""
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
    """The biases that belong to the masks of ``along``, in the same order and form. An element is
    None if its position has no bias. The list is empty if no position of the draft has a bias."""
    messages: list[str] = []
    """The texts that the program has sent to its client."""
    texts: Annotated[list[list[TokenId]], Meta(max_length=MAX_SCORED_TEXTS)] = []
    """``score``: the tokens of the texts. Each text follows the sequence directly."""
    prompt: list[TokenId] = []
    """The prompt with which the sequence begins anew. The former prompt and all tokens after it are
    dropped. ``ff_tokens`` follow the new prompt. ``backtrack`` is 0 in this case."""
    pin: Pin | None = None
    """Pins the computed blocks of the sequence."""
    awaits: int = 0
    """``suspend``: the number of the input that the program waits for, or 0."""
    run: int = 1
    """With ``sample``: the maximum number of tokens that are sampled before the next STEP. If it is
    above 1, these tokens are a *run*: every token is allowed, and the mask has the tokens that end
    the run. Only for requests whose START has ``takes_runs``."""
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

    When a suspended sequence resumes, the controller worker sends the sequence's result without
    having received a STEP.
    """

    sequences: list[StepResult]
    usual: list[int] = []
    """A short form of the most frequent results, for requests whose START has ``reads_usual``. Each
    result is three numbers: the request, the sequence and ``StepResult.row``. The action is
    ``sample``, and all other fields have their defaults. The results of a round that forks are in
    ``sequences`` instead, because their order matters."""
    host: str = ""
    """The id of the controller worker's machine (``machine_id``)."""
    attempts: dict[Id, int] = {}
    """``Start.attempt`` by request. Contains each request that was started again and has its first
    result in this message. Results of such a request in earlier messages belong to an earlier
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
    """To a state worker: true if the requests have not ended, but continue at another broker."""
    detached: bool = False
    """To a state worker: true if the client of the requests had no connection to this broker. If
    several brokers run, the client may then be connected to another broker, and the requests may
    continue there."""


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
    same answer. ``give`` comes from the broker, and stores the client's input with the number
    ``count``. ``take`` returns the next input; the version in its answer is the input's number, or
    0 if no input waits. ``save`` and ``open`` write and read a context of the request's tenant. If
    the context does not exist, the answer to ``open`` has version 0.
    """

    request: Id
    lineage: int
    """The lineage of the sequence: 0 for sequence 0, otherwise a hash of the forks that led to the
    sequence. Each sequence of a request has a different lineage."""
    count: int
    """The number of the operation in its sequence, from 1."""
    op: Literal["get", "set", "append", "give", "take", "save", "open"]
    name: str
    value: bytes = b""
    when_version_is: int | None = None
    """Write only if the variable has this version; 0 stands for a variable that does not exist. In
    the state worker's log, an ``open`` that was refused has the number of bytes of the refused
    context in this field."""
    place: int | None = None
    """The number of the request's operations before this one. The operation is applied only if
    exactly this number of operations has been applied. The answer then has no value, because the
    sender has a copy of the request's variables that answers the operation. If None, the operation
    is always applied, and the answer is complete."""


class VariableAnswer(Struct, array_like=True):
    """``VARIABLE_ANSWER``: the variable after the operation. If ``version`` is 0, the variable does
    not exist.

    The answer to an applied write has ``written``, and no value. If the version of a write did not
    match, the answer is that of a ``get``: the present version and value.
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
    """With ``error``: whether the reason of the failure is temporary, such as a full disk. The
    operation may then succeed if it is sent again."""
    first: bool = False
    """Whether this is the first operation of its request. Inputs of the client (``give``) do not
    count."""


class Inputs(Struct, kw_only=True, omit_defaults=True):
    """``INPUTS``: the request in the header has a new input. When the state worker has stored the
    input, the broker sends this message to the request's controller worker."""

    number: int
    """The number of the input."""


# --- tools ---------------------------------------------------------------------------------------

MAX_ARGUMENT_BYTES = 64 * 1024
MAX_RESULT_BYTES = 128 * 1024
"""Maximum bytes of the arguments of a call, and of its result. A result is stored as a variable of
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
    """The ``Variable.count`` of the operation that recorded the call in a variable."""
    tool: str
    arguments: bytes = b""
    """A JSON object: the arguments by name."""
    again: bool = False
    """Whether an earlier attempt of the request may already have sent the call. If so, the call is
    not made again. The tool worker that has received the call sends the answer now, or when the
    function returns."""
    owner: str = ""
    """The client for which the call is made: the call counts towards this client's share of the
    tool worker's threads. The broker writes this field and ``user``. A broker of an earlier release
    leaves both empty."""
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
# The state worker has a table for each tenant, which lists the tenant's modules and tags. The bytes
# of a module are stored by the controller workers that have used the module. The headers of
# messages about modules do not name a request.


class ModuleTable(Struct, array_like=True):
    """``MODULE_TABLE``: reads or replaces the table of a tenant. Sent to the state worker, which
    does not interpret the table.

    The table is replaced only if ``known`` is its current version (compare-and-set).
    """

    id: Id
    """Identifies the operation. The answer has the same id. A replacement that is sent again with
    the same id is done only once."""
    tenant: str
    known: int = 0
    """The version of the table that the sender has; 0 if the sender does not have the table, or if
    the table does not exist yet."""
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
    """Why the operation was not done. The reason is temporary."""


class FetchModule(Struct, kw_only=True, omit_defaults=True):
    """``FETCH_MODULE``: a controller worker needs the bytes of a module.

    If the header has no address, the broker sends the message to all other workers that run
    modules. Each worker that has the module answers, without the bytes. Then the sender repeats the
    message with the address of one of these workers, and this worker answers with the bytes.
    """

    module: str
    """The id of the module: SHA-256 of its bytes, hexadecimal."""
    send: bool = False
    """Whether the answer must have the bytes. If false, the receiver only reports that it has the
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
