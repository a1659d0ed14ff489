"""Guests of the native ABI. An ABI defines the functions that the worker and a guest call in each
other. Each call of a controller is one call of a function of the guest. The guest returns results
in its memory, without calling the host.

The host writes a call's argument into the guest's *inbox*, a buffer in the guest's memory. It then
calls the guest, and reads the result and the mask from the guest's memory. The *call block* is
another buffer in the guest's memory. It has the addresses of the inbox and of the results.
``docs/controllers-reference.md`` describes the layout.
"""

from __future__ import annotations

import array
import ctypes
import struct
from collections.abc import Sequence

import numpy as np
import wasmtime

from ....protocol.errors import Code, ControllerError
from ....protocol.messages import MAX_INPUT_BYTES
from ....protocol.sampling import MAX_QUERY_TOKENS, Override, Query
from ....protocol.special_tokens import SpecialToken
from ....protocol.worker_messages import MAX_ARGUMENT_BYTES
from .. import biases
from ..host import Host, Stored
from ..interface import CONTINUE, STOP, SUSPEND, Action, Answer, Controller
from ..queries import checked_override, checked_query
from ..tool_calls import NO_TOOLS
from .host_functions import HostFunction, linkers
from .instance import Guest, Template
from .wasi import WASI, start_function

VERSION = 1
START = f"tokenbus_abi_v{VERSION}"
TOKENIZED_WORK = 64
"""Tokenizing one byte of text takes about as long as copying this number of bytes."""
NAME_BYTES = 256
"""Maximum bytes of a variable's name."""

_VERSION, _INBOX, _INBOX_SIZE, _COUNT, _BACKTRACK, _SEQ, _ARG, _VOCABULARY = range(8)
_N, _LIST, _DROP, _MASK, _EOS, _MAX_TOKENS, _BIAS, _PAIRS = range(8, 16)


class NativeProgram:
    """A module of the native ABI."""

    def __init__(
        self, engine: wasmtime.Engine, module: wasmtime.Module, why_no_fork: str | None = None
    ):
        self._template = Template(_linker(engine), module, engine)
        self._why_no_fork = why_no_fork

    def start(self, host: Host) -> Controller:
        """Creates an instance and its controller."""
        state = NativeState(host)
        guest = state.guest = Guest(self._template, state, host.limits, host.memory)
        try:
            begin = start_function(self._template.exports)
            if begin is not None:
                guest.call(guest.function(begin), host.limits.init_s, begin)
            block = guest.call(guest.function(START), host.limits.init_s, START) & 0xFFFF_FFFF
            if block % 4:
                raise ControllerError(
                    Code.CONTROLLER_FAILED,
                    f"{START} returned the address {block}, which is not aligned to 4",
                )
            return NativeController(guest, host, block, self._why_no_fork)
        except BaseException:
            guest.close()
            raise


class NativeState:
    """The state that the host functions of one guest use."""

    __slots__ = ("asks", "guest", "host", "next_query", "override", "query", "takes_drafts")

    guest: Guest
    query: Query | None
    next_query: Query | None
    override: Override | None
    asks: bool
    takes_drafts: bool

    def __init__(self, host: Host, parent: NativeState | None = None) -> None:
        """``parent``: the state of the sequence that is forked."""
        self.host = host
        self.query = parent.query if parent is not None else None
        """The query that the guest made in init_prompt; it applies to every token."""
        self.next_query = parent.next_query if parent is not None else None
        self.override = parent.override if parent is not None else None
        """``next_query`` and ``override`` apply to the next token only."""
        self.asks = parent is not None and parent.asks
        """Whether ``query``, ``next_query`` or ``override`` is set."""
        self.takes_drafts = parent is not None and parent.takes_drafts

    def take_query(self) -> Query | None:
        """Returns the query about the next token, and resets it if it applies to one token only.
        The override remains for the next sampled token."""
        query, self.next_query = self.next_query or self.query, None
        self.asks = self.query is not None or self.override is not None
        return query

    def take_options(self) -> tuple[Query | None, Override | None]:
        """Returns the query and the override for the next token, and resets those that apply to one
        token only."""
        query, override = self.next_query or self.query, self.override
        self.next_query = self.override = None
        self.asks = self.query is not None
        return query, override


class NativeController:
    """The controller of one sequence."""

    _shown_as = ""
    """If this text is not empty, errors of the guest begin with it instead of the call's name."""

    def __init__(self, guest: Guest, host: Host, block: int, why_no_fork: str | None) -> None:
        guest.check(block, 64)
        self._guest = guest
        self._state: NativeState = guest.host
        self._host = host
        self._block_at = block
        self._why_no_fork = why_no_fork
        self._block = block_words = (ctypes.c_uint32 * 16).from_address(guest.base + block)
        self._words = -(-host.vocabulary.size // 32)
        self._mask = ctypes.c_char * (4 * self._words)
        self._pre = guest.function("tokenbus_pre_process")
        self._mid = guest.function("tokenbus_mid_process")
        self._post = guest.function("tokenbus_post_process")
        block_words[_SEQ] = host.seq
        block_words[_VOCABULARY] = host.vocabulary.size
        block_words[_EOS] = host.vocabulary.eos & 0xFFFF_FFFF
        block_words[_MAX_TOKENS] = host.max_tokens

    @property
    def takes_drafts(self) -> bool:
        """Whether the guest has called ``take_drafts`` and can be copied."""
        return self._state.takes_drafts and self._why_no_fork is None

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Calls tokenbus_init_prompt with the prompt and the argument."""
        guest = self._guest
        arg = self._host.arg
        self._put(prompt, self._host.limits.init_s, arg)
        self._block[_ARG] = len(arg)
        init = guest.function("tokenbus_init_prompt")
        guest.call(init, self._host.limits.init_s, self._shown_as or "init_prompt")
        self._block[_ARG] = 0
        state = self._state
        state.query, state.next_query = state.next_query, None
        guest.count()

    def pre_process(self) -> Answer:
        """Calls tokenbus_pre_process."""
        block = self._block
        block[_COUNT] = 0
        limit_s = self._limit(self._host.limits.pre_s)
        action = self._guest.call(self._pre, limit_s, self._shown_as or "pre_process")
        if action == 1:
            return CONTINUE
        if action == 0:
            return STOP
        if action == 2:
            self._guest.count()
            return SUSPEND
        if action == 3:
            return Answer(Action.FORK, count=block[_N])
        if action == 4:
            return Answer(Action.SPLICE, tokens=self._tokens())
        known = "0 (stop), 1 (continue), 2 (suspend), 3 (fork), 4 (append)"
        raise _unknown("pre_process", action, known)

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """Calls tokenbus_mid_process, copies the mask that the guest wrote, and checks the guest's
        bias."""
        block = self._block
        if len(fork_group) == 1:
            # The guest may have moved the inbox, so the inbox's address is checked each time.
            self._put_one(fork_group[0])
        else:
            self._put(fork_group, self._host.limits.mid_s)
        limit_s = self._limit(self._host.limits.mid_s)
        action = self._guest.call(self._mid, limit_s, self._shown_as or "mid_process")
        self._guest.count()
        if action == 1:
            answer = self._sampling(mask)
            if not self._state.asks:
                return answer
            query, override = self._state.take_options()
            return answer._replace(query=query, override=override)
        if action == 0:
            return STOP
        if action == 4:
            return Answer(Action.SPLICE, backtrack=block[_DROP], tokens=self._tokens())
        return self._other_answer(action, mask)

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Calls tokenbus_post_process."""
        block = self._block
        if len(tokens) == 1:
            self._put_one(tokens[0])
        else:
            self._put(tokens, self._host.limits.post_s)
        block[_BACKTRACK] = backtrack
        limit_s = self._limit(self._host.limits.post_s)
        action = self._guest.call(self._post, limit_s, self._shown_as or "post_process")
        if backtrack:
            block[_BACKTRACK] = 0
        if action == 1:
            return CONTINUE
        if action == 0:
            return STOP
        raise _unknown("post_process", action, "0 (stop), 1 (continue)")

    def fork(self, host: Host) -> Controller:
        """A controller with a copy of the instance."""
        if self._why_no_fork is not None:
            raise ControllerError(
                Code.CONTROLLER_FAILED, f"this module cannot fork: {self._why_no_fork}"
            )
        state = NativeState(host, self._state)
        state.guest = guest = self._guest.clone(state, host.limits)
        return type(self)(guest, host, self._block_at, self._why_no_fork)

    def close(self) -> None:
        """Frees the instance."""
        self._guest.close()

    # --- inside ---------------------------------------------------------------------------------

    def _limit(self, own_s: float) -> float:
        """The limit on the CPU time of a call, in seconds. ``own_s``: the limit of this call in
        ``Limits``. The guests of scripts override this method (``scripts.guest``)."""
        return own_s

    def _other_answer(self, action: int, mask: memoryview) -> Answer:
        """The answer of a mid_process whose result is not 0 (stop), 1 (sample) or 4 (splice). The
        result must be LOOK; only the guests of scripts have further results (``scripts.guest``)."""
        if action == Action.LOOK:
            return Answer(Action.LOOK, query=self._state.take_query())
        raise _unknown("mid_process", action, "0 (stop), 1 (sample), 4 (splice), 10 (look)")

    def _put_one(self, number: int) -> None:
        block, guest = self._block, self._guest
        address = block[_INBOX]
        if address + 4 > guest.size:
            guest.check(address, 4)
        ctypes.c_uint32.from_address(guest.base + address).value = number
        block[_COUNT] = 1

    def _put(self, numbers: Sequence[int], limit_s: float, more: bytes = b"") -> None:
        """Writes an argument into the inbox. If the inbox is too small, the guest is first called
        to enlarge the inbox; ``limit_s`` is the limit on this call's CPU time, in seconds."""
        data = array.array("I", numbers).tobytes() + more
        guest, block = self._guest, self._block
        if len(data) > block[_INBOX_SIZE]:
            grow = guest.function("tokenbus_grow")
            if not guest.call_with(grow, limit_s, "tokenbus_grow", len(data)):
                raise ControllerError(
                    Code.CONTROLLER_FAILED,
                    f"the guest could not allocate {len(data)} bytes for its inbox",
                )
        guest.write(block[_INBOX], data)
        block[_COUNT] = len(numbers)

    def _sampling(self, mask: memoryview) -> Answer:
        """The answer of a mid_process whose action is to sample. Copies the guest's mask into
        ``mask``."""
        block, guest = self._block, self._guest
        address = block[_MASK]
        bias = self._own_bias()
        if not address:
            return CONTINUE if bias is None else Answer(Action.CONTINUE, bias=bias)
        size = 4 * self._words
        if address + size > guest.size:
            guest.check(address, size)
        mask[:] = memoryview(self._mask.from_address(guest.base + address)).cast("B")
        return _MASKED if bias is None else _MASKED._replace(bias=bias)

    def _bias(self) -> biases.Bias | None:
        """The bias that mid_process has left in the guest's memory."""
        guest, address, pairs = self._guest, self._block[_BIAS], self._block[_PAIRS]
        size = self._host.vocabulary.size
        if pairs > size:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the bias has {pairs} pairs; the vocabulary has {size} tokens",
            )
        count = 2 * pairs or size
        guest.check(address, 4 * count)
        data = (ctypes.c_char * (4 * count)).from_address(guest.base + address)
        found = np.frombuffer(memoryview(data).cast("B"), dtype="<u4")
        if not pairs:
            return biases.dense(found.view("<f4"), size)
        return biases.sparse(found[::2], found[1::2].view("<f4"), size)

    def _own_bias(self) -> biases.Bias | None:
        """The bias of the guest's answer; None if the answer does not have a bias."""
        return self._bias() if self._block[_BIAS] else None

    def _list(self) -> tuple[int, int]:
        """The address and the length of the list in the guest's answer."""
        return self._block[_LIST], self._block[_N]

    def _tokens(self) -> list[int]:
        count = self._block[_N]
        most = self._host.limits.appended_tokens
        if count > most:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the controller appended {count} tokens at once; at most {most} are allowed",
            )
        return array.array("I", self._guest.read(self._block[_LIST], 4 * count)).tolist()


_MASKED = Answer(Action.CONTINUE, masked=True)


def _unknown(phase: str, action: int, known: str) -> ControllerError:
    return ControllerError(
        Code.CONTROLLER_FAILED, f"{phase} returned {action}; it must return one of {known}"
    )


# --- the functions that a guest may import --------------------------------------------------------


def _log(state: NativeState, address: int, size: int) -> None:
    state.guest.check(address, size)
    log = state.host.log
    log.write(state.guest.read(address, log.room(size)))


def _fail(state: NativeState, address: int, size: int) -> None:
    text = state.guest.read(address, min(size, 4096)).decode("utf-8", "replace")
    raise ControllerError(Code.CONTROLLER_FAILED, text or "it failed without a message")


def _seq_id(state: NativeState) -> int:
    return state.host.seq


def _special_token(state: NativeState, number: int) -> int:
    return special_token(state.host, number)


def special_token(host: Host, number: int) -> int:
    """The id of the special token ``SpecialToken(number)``. -1 if the model does not have this
    token. Also -1 if ``SpecialToken`` does not have this number, because a later release may define
    it."""
    if number not in set(SpecialToken):
        return -1
    found = host.vocabulary.special_token(SpecialToken(number))
    return -1 if found is None else found


def _tokenize(state: NativeState, address: int, size: int, into: int, most: int) -> int:
    tokens = tokenized(state.guest, state.host, address, size)
    state.guest.write(into, array.array("I", tokens[:most]).tobytes())
    return len(tokens)


def tokenized(guest: Guest, host: Host, address: int, size: int) -> list[int]:
    """The tokens of a text in a guest's memory. Raises ControllerError if the text is too long for
    the time limit of the current call."""
    most = host.limits.max_text(guest.limit_s)
    if size > most:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the text to tokenize has {size} bytes; at most {most} are allowed in a call of "
            f"{guest.limit_s * 1000:g} ms",
        )
    guest.charge(TOKENIZED_WORK * size)
    return host.vocabulary.tokenize(guest.read(address, size), guest.check_time)


def _token_bytes(
    state: NativeState, tokens: int, count: int, into: int, most: int, lengths_at: int
) -> int:
    """Writes the bytes of tokens, one token after another, and the length of each token. Returns
    the total length in bytes. An id outside the vocabulary has no bytes."""
    guest, vocabulary = state.guest, state.host.vocabulary
    guest.charge(TOKENIZED_WORK * count)
    numbers = array.array("I", guest.read(tokens, 4 * count))
    pieces = [vocabulary.token(number) for number in numbers]
    data = b"".join(pieces)
    guest.charge(len(data))
    guest.write_part(into, data, most)
    if lengths_at:
        guest.write(lengths_at, array.array("I", map(len, pieces)).tobytes())
    return len(data)


def _trie_size(state: NativeState) -> int:
    return len(state.host.vocabulary.trie)


def _trie_read(state: NativeState, into: int, offset: int, size: int) -> int:
    trie, guest = state.host.vocabulary.trie, state.guest
    size = max(0, min(size, len(trie) - offset))
    guest.check(into, size)
    guest.charge(size)
    # The trie has several megabytes, so the bytes are copied directly into the guest's memory,
    # without a slice.
    at = ctypes.cast(ctypes.c_char_p(trie), ctypes.c_void_p).value or 0
    ctypes.memmove(guest.base + into, at + offset, size)
    return size


def _name(state: NativeState, address: int, size: int) -> str:
    if not 0 < size <= NAME_BYTES:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the variable name has {size} bytes of UTF-8; a name has 1 to {NAME_BYTES}",
        )
    try:
        return state.guest.read(address, size).decode()
    except UnicodeDecodeError as error:
        raise ControllerError(
            Code.CONTROLLER_FAILED, f"the variable name is not UTF-8: {error}"
        ) from None


def _var_get(
    state: NativeState, name: int, name_size: int, into: int, most: int, version_at: int
) -> int:
    stored = state.host.variables.get(_name(state, name, name_size))
    if version_at:
        state.guest.word(version_at, stored.version if stored is not None else 0)
    return _given(state, stored, into, most)


def _var_wait(
    state: NativeState, name: int, name_size: int, into: int, most: int, version: int
) -> int:
    name_ = _name(state, name, name_size)
    return _given(state, state.host.variables.await_write(name_, version), into, most)


def _given(state: NativeState, stored: Stored | None, into: int, most: int) -> int:
    """Writes a variable's value; returns the value's size, or -1 if the variable does not exist."""
    if stored is None:
        return -1
    state.guest.charge(len(stored.value))
    state.guest.write_part(into, stored.value, most)
    return len(stored.value)


def _var_write(append: bool) -> HostFunction:
    def write(
        state: NativeState,
        name: int,
        name_size: int,
        value: int,
        size: int,
        when_version: int,
        version_at: int,
    ) -> int:
        if size > state.host.limits.variable_bytes:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the variable's value has {size} bytes; at most "
                f"{state.host.limits.variable_bytes} are allowed",
            )
        state.guest.charge(size)
        variables = state.host.variables
        act = variables.append if append else variables.set
        when = None if when_version == 0xFFFF_FFFF else when_version
        written = act(_name(state, name, name_size), state.guest.read(value, size), when)
        if version_at:
            state.guest.word(version_at, written.version)
        return int(written.ok)

    return HostFunction("iiiiii", "i", write)


def _send(state: NativeState, address: int, size: int) -> None:
    if size > MAX_INPUT_BYTES:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the text for the client has {size} bytes; at most {MAX_INPUT_BYTES} are allowed",
        )
    state.guest.charge(size)
    state.host.variables.send(state.guest.read(address, size))


def _receive(state: NativeState, into: int, most: int) -> int:
    """Writes the client's next input; returns the input's size, or -1 if no input has arrived. The
    guest must have room for ``MAX_INPUT_BYTES``, so that any input fits."""
    if most < MAX_INPUT_BYTES:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the room for an input has {most} bytes; expected at least {MAX_INPUT_BYTES}",
        )
    state.guest.check(into, most)
    text = state.host.variables.receive()
    if text is None:
        return -1
    state.guest.charge(len(text))
    state.guest.write_part(into, text, most)
    return len(text)


def _tool_call(
    state: NativeState, tool: int, tool_size: int, given: int, size: int, into: int, most: int
) -> int:
    """Begins a call of a tool, and writes the name of the call's record, which is the variable that
    will have the answer."""
    guest, tools = state.guest, state.host.tools
    if tools is None:
        raise ControllerError(Code.CONTROLLER_FAILED, NO_TOOLS)
    if size > MAX_ARGUMENT_BYTES:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the arguments of a tool have {size} bytes; at most {MAX_ARGUMENT_BYTES} are allowed",
        )
    guest.charge(size)
    # ``_name`` also accepts every valid name of a tool, because these names are shorter than those
    # of variables.
    record = tools.begin(_name(state, tool, tool_size), guest.read(given, size)).encode()
    guest.write_part(into, record, most)
    return len(record)


def _take_drafts(state: NativeState) -> None:
    state.takes_drafts = True


def _query(state: NativeState, top: int, tokens: int, count: int) -> None:
    if count > MAX_QUERY_TOKENS:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            f"the query has {count} tokens; at most {MAX_QUERY_TOKENS} are allowed",
        )
    named = array.array("I", state.guest.read(tokens, 4 * count)).tolist() if count else []
    state.next_query = checked_query(Query(top, named), state.host.vocabulary.size)
    state.asks = True


def _override(state: NativeState, which: int, value: int) -> None:
    """Sets the parameter with the number ``which`` to ``value``: the bits of a float32, or a
    seed."""
    before = state.override or Override()
    if which == 2:
        override = Override(before.temperature, before.top_p, value)
    else:
        number = struct.unpack("<f", struct.pack("<I", value & 0xFFFF_FFFF))[0]
        if which == 0:
            override = Override(number, before.top_p, before.seed)
        else:
            override = Override(before.temperature, number, before.seed)
    state.override = checked_override(override)
    state.asks = True


def _distribution(state: NativeState, place: int, into: int, most: int) -> int:
    """Writes the answer to the guest's query about the token with the index ``place`` in the tokens
    that post_process received last. Returns the answer's size in bytes, or -1 if this token does
    not have an answer.

    An answer consists of the token's log-probability (f32) and rank, the entropy (f32), the lengths
    of two lists, and the two lists. The lists have pairs of a token and its log-probability (f32):
    first the most likely tokens, then the tokens that the query named.
    """
    seen = state.host.distributions
    if place >= len(seen):
        return -1
    one = seen[place]
    pairs = [*one.top.items(), *one.scores.items()]
    head = struct.pack("<fIfII", one.logprob, one.rank, one.entropy, len(one.top), len(one.scores))
    data = head + b"".join(struct.pack("<If", *pair) for pair in pairs)
    state.guest.charge(len(data))
    state.guest.write_part(into, data, most)
    return len(data)


FUNCTIONS: dict[tuple[str, str], HostFunction] = {
    ("tokenbus", "log"): HostFunction("ii", "", _log),
    ("tokenbus", "fail"): HostFunction("ii", "", _fail),
    ("tokenbus", "seq_id"): HostFunction("", "i", _seq_id),
    ("tokenbus", "special_token"): HostFunction("i", "i", _special_token),
    ("tokenbus", "tokenize"): HostFunction("iiii", "i", _tokenize),
    ("tokenbus", "token_bytes"): HostFunction("iiiii", "i", _token_bytes),
    ("tokenbus", "trie_size"): HostFunction("", "i", _trie_size),
    ("tokenbus", "trie_read"): HostFunction("iii", "i", _trie_read),
    ("tokenbus", "var_get"): HostFunction("iiiii", "i", _var_get),
    ("tokenbus", "var_wait"): HostFunction("iiiii", "i", _var_wait),
    ("tokenbus", "var_set"): _var_write(append=False),
    ("tokenbus", "var_append"): _var_write(append=True),
    ("tokenbus", "send"): HostFunction("ii", "", _send),
    ("tokenbus", "receive"): HostFunction("ii", "i", _receive),
    ("tokenbus", "tool_call"): HostFunction("iiiiii", "i", _tool_call),
    ("tokenbus", "take_drafts"): HostFunction("", "", _take_drafts),
    ("tokenbus", "query"): HostFunction("iii", "", _query),
    ("tokenbus", "override"): HostFunction("iI", "", _override),
    ("tokenbus", "distribution"): HostFunction("iii", "i", _distribution),
    **WASI,
}
"""The functions of module ``tokenbus`` for guests, and the deterministic part of WASI."""

_linker = linkers(FUNCTIONS)
