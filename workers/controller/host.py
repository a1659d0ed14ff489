"""The worker's services for the controller of one sequence: tokens, variables, log, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...protocol.sampling import Distribution, Scores
from ...protocol.special_tokens import SpecialToken
from .guest_memory import TenantMemory
from .limits import Limits
from .logs import Log


class Vocabulary(Protocol):
    """The tokens of a model; ``vocabulary.TokenizerVocabulary`` implements it."""

    size: int
    """Token ids are below ``size``; a mask has ceil(size / 32) words of 32 bits."""
    eos: int
    """The first end-of-sequence token; -1 if the model does not have one."""
    eos_ids: tuple[int, ...]
    """All end-of-sequence tokens."""
    has_every_byte: bool
    """Whether each of the 256 bytes is a token. If so, any text can be written with one token for
    each byte."""
    fingerprint: str
    special: Mapping[str, int]
    """The ids of the special tokens (which are not text), by name."""

    def token(self, number: int) -> bytes:
        """The bytes of a token; empty for a special token and for an id that is not valid."""

    def special_token(self, token: SpecialToken) -> int | None:
        """The id of a special token; None if the model does not have it."""

    def tokenize(self, text: bytes, check: Callable[[], None] | None = None) -> list[int]:
        """The tokens of a text, without special tokens. Each byte that is not valid UTF-8 becomes a
        token of its own.

        ``check`` is called repeatedly, and may raise to stop the call. Raises ControllerError if
        the vocabulary cannot represent the text.
        """

    def tokens_with(self, byte: int) -> bytes:
        """The tokens whose bytes contain ``byte``, as a mask of ``4 * ceil(size / 32)`` bytes."""

    @property
    def trie(self) -> bytes:
        """The token trie (``tokens/trie.py``), in the binary format that AICI's guests read."""


class Stored(NamedTuple):
    """A variable: its value, and its version, which counts writes."""

    version: int
    value: bytes


class Written(NamedTuple):
    """The answer to a write. A write is done if ``when_version_is`` is None or equals the
    variable's version."""

    ok: bool
    version: int
    """The variable's version after the operation; 0 if the variable does not exist."""
    value: bytes = b""
    """The variable's value if the write was not done; empty if it was done."""


class Variables(Protocol):
    """The variables of a request, for one of its sequences. Calls wait for the state worker.

    Each call raises ControllerError if a name or a value is not valid, if the quota is exceeded, or
    if the state worker does not answer.
    """

    def get(self, name: str) -> Stored | None:
        """A variable; None if it does not exist."""

    def await_write(self, name: str, version: int = 1) -> Stored | None:
        """Like ``get``, but returns None if the variable's version is below ``version``. If the
        sequence then suspends, it is woken when this version is written. Other changes do not wake
        the sequence. But the sequence may be woken earlier if all sequences of the request are
        suspended (``IdleGroups``)."""

    def set(self, name: str, value: bytes, when_version_is: int | None = None) -> Written:
        """Writes a variable. If ``when_version_is`` is given, the variable is written only if it
        has this version; version 0 means that the variable does not exist."""

    def append(self, name: str, value: bytes, when_version_is: int | None = None) -> Written:
        """Appends ``value`` to a variable, which is created if it does not exist.
        ``when_version_is``: see ``set``."""

    def receive(self) -> bytes | None:
        """The client's next input; None if no input has arrived. If the sequence then suspends, the
        next input wakes it."""

    def send(self, text: bytes) -> None:
        """Sends a text to the client. The text is part of this round's result."""


class NextTokens(NamedTuple):
    """The tokens that may follow a text under a constraint."""

    mask: bytes
    """Bit i of the little-endian u32 words is set if token i may follow. If the text may end here,
    the bit of the token ``Vocabulary.eos`` is set too."""
    may_end: bool
    """Whether the text may end here."""
    ends: bool
    """Whether only the end may follow."""


class Questions(Protocol):
    """Answers questions of a script (a program in Python or JavaScript, ``scripts/``) about
    built-in constraints."""

    def next_tokens(self, kind: str, argument: str, text: Sequence[int]) -> NextTokens:
        """The tokens that may follow ``text`` under the constraint ``kind`` with an argument.

        Raises TokenbusError if the argument is not valid, or if the constraint does not allow the
        text.
        """


class Tools(Protocol):
    """Calls of tools (functions that tool workers serve) by one sequence."""

    def begin(self, tool: str, arguments: bytes) -> str:
        """Calls a tool with ``arguments``, a JSON object. Returns the name of the request's
        variable that will contain the answer.

        When the tool has answered, ``tool_calls.answer_of`` reads the answer from the variable's
        value. Raises TokenbusError if the call cannot be recorded.
        """


@dataclass(slots=True, eq=False)
class Host:
    """The environment of one sequence's controller."""

    request: int
    seq: int
    arg: bytes
    """The request's ``controller_arg``: text as UTF-8, anything else as JSON."""
    vocabulary: Vocabulary
    variables: Variables
    log: Log
    limits: Limits
    max_tokens: int = 0
    """Maximum number of tokens after the prompt."""
    ignore_eos: bool = False
    """Whether the sequence continues after an end-of-sequence token. The controller may still end
    the sequence."""
    memory: TenantMemory | None = None
    """Counts the memory of this sequence's guests; None if their memory is not counted."""
    questions: Questions | None = None
    """Answers a script's questions about constraints; None if the controller is not a script."""
    tools: Tools | None = None
    """The tools of the sequence; None if the controller cannot call tools."""
    distributions: Sequence[Distribution] = ()
    """The distribution from which each token of the last post_process was sampled; empty if the
    tokens were appended, or if the controller did not query the distribution."""
    scores: Scores = field(default_factory=list)
    """The scores of the texts, in the post_process after the action SCORE; empty in other calls."""
    refusal: str = ""
    """The reason for a failure, in the post_process after the action SAVE, OPEN or GENERATE; empty
    if the action has not failed. SAVE and OPEN fail if the context is not saved or opened. GENERATE
    fails if the constraint of the text is not valid."""
    logprobs: Sequence[float | None] = ()
    """The log-probability of each token of the last post_process under the model's own
    distribution. Empty if the controller did not ask for log-probabilities (``Answer.logprobs``).
    In the post_process after GENERATE, None stands for a token that was not sampled."""

    def give(
        self,
        distributions: Sequence[Distribution] = (),
        scores: Scores | None = None,
        refusal: str = "",
        logprobs: Sequence[float | None] = (),
    ) -> None:
        """Sets the values that the next post_process reads from this host. ``Rounds`` calls this
        method before each post_process."""
        self.distributions, self.scores, self.refusal = distributions, scores or [], refusal
        self.logprobs = logprobs


def allowed(mask: memoryview | bytes, size: int) -> Sequence[int]:
    """The tokens that a mask allows; for tests and debugging."""
    data = bytes(mask)
    return [i for i in range(size) if data[i >> 3] >> (i & 7) & 1]
