"""Guests of the AICI ABI: compiled AICI modules, unmodified.

The arguments and the results of calls are JSON. The guest imports functions of the module ``env``
to read an argument and to return a result. It reads an argument as a *blob*: bytes that a number
identifies. Source: AICI's crate ``aici_abi``.
"""

from __future__ import annotations

import array
import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import wasmtime

from ....protocol.errors import Code, ControllerError
from ..host import Host
from ..interface import SUSPEND, Answer, Controller
from .aici_calls import (
    check_init_prompt,
    init_prompt_argument,
    mid_process_answer,
    mid_process_argument,
    post_process_answer,
    post_process_argument,
    pre_process_answer,
)
from .aici_storage import max_bytes, run_command
from .host_functions import HostFunction, linkers
from .instance import Guest, Template
from .native import special_token, tokenized
from .wasi import MAX_PIECES, OK, WASI, start_function
from .wasi import MODULE as WASI_MODULE

RESULT_BYTES = 1024 * 1024
"""Maximum bytes of the result of a call."""
LAST_WORDS_BYTES = 1000
"""If a guest calls ``aici_host_stop``, the error message contains at most this number of bytes from
the end of the current call's log."""
CONFIG = frozenset({b"fork", b"backtrack", b"ff_tokens"})
"""The names for which ``aici_host_get_config`` returns 1."""

_MODULE_ARG, _PROCESS_ARG, _TRIE, _TOKENIZED, _STORAGE, _TOKENS = range(1, 7)
"""The numbers of the blobs. A guest has one blob of each kind, so that their memory is bounded."""
_MADE = (_PROCESS_ARG, _TOKENIZED, _STORAGE, _TOKENS)
"""The blobs that belong to one guest. All guests of a request or of a model share the other
blobs."""
_KINDS = {
    _PROCESS_ARG: "the argument of a call (aici_host_process_arg)",
    _TRIE: "the token trie (aici_host_token_trie)",
    _TOKENIZED: "tokenized text (aici_host_tokenize)",
    _STORAGE: "the answer to a storage command (aici_host_storage_cmd)",
    _TOKENS: "the tokens (aici_host_tokens)",
}


class AiciProgram:
    """A module of the AICI ABI."""

    def __init__(
        self, engine: wasmtime.Engine, module: wasmtime.Module, why_no_fork: str | None = None
    ):
        """``why_no_fork``: the reason why instances of the module cannot be copied; None if they
        can. Raises wasmtime.WasmtimeError for an unknown import."""
        self._template = Template(_linker(engine), module, engine)
        self._why_no_fork = why_no_fork
        self._keeps_tokens = any(i.name == "aici_host_tokens" for i in module.imports)

    def start(self, host: Host) -> Controller:
        """Creates an instance and its controller. Each call of a start-up function has the limit
        ``Limits.init_s``."""
        state = AiciState(host)
        if self._keeps_tokens:
            state.tokens = array.array("I")
        guest = state.guest = Guest(self._template, state, host.limits, host.memory)
        limit = host.limits.init_s
        try:
            handle = 0
            for name in (start_function(self._template.exports), "aici_init", "aici_create"):
                if name is not None:
                    handle = guest.call(guest.function(name), limit, name)
            return AiciController(guest, state, handle, self._why_no_fork)
        except BaseException:
            guest.close()
            raise


class AiciState:
    """The state of the host functions of one guest."""

    __slots__ = (
        "blobs",
        "guest",
        "host",
        "last_words",
        "mask",
        "mask_type",
        "masked",
        "result",
        "tokens",
    )

    guest: Guest

    def __init__(self, host: Host) -> None:
        self.host = host
        self.blobs: list[bytes | None] = [None] * 7
        self.blobs[_MODULE_ARG] = host.arg
        self.result: bytes | None = None
        """The result of the current call; None until the guest returns the result."""
        self.mask: memoryview | None = None
        """The buffer for the mask; None if mid_process is not running."""
        self.masked = False
        self.mask_type: Any = ctypes.c_char * (4 * -(-host.vocabulary.size // 32))
        self.last_words = b""
        """The last bytes of the log of the current call."""
        self.tokens: array.array[int] | None = None
        """The tokens of the sequence, including its prompt; None if the module does not import
        ``aici_host_tokens``."""


class AiciController:
    """The controller of one sequence."""

    def __init__(
        self, guest: Guest, state: AiciState, handle: int, why_no_fork: str | None
    ) -> None:
        self._guest = guest
        self._state = state
        self._handle = handle
        self._why_no_fork = why_no_fork
        self._pre = guest.function("aici_pre_process")
        self._mid = guest.function("aici_mid_process")
        self._post = guest.function("aici_post_process")
        self._alone = mid_process_argument([state.host.seq])

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """See ``interface.Controller``."""
        if self._state.tokens is not None:
            self._state.tokens.extend(prompt)
        call = self._guest.function("aici_init_prompt")
        limit = self._state.host.limits.init_s
        check_init_prompt(self._call(call, limit, "init_prompt", init_prompt_argument(prompt)))
        self._count()

    def pre_process(self) -> Answer:
        """See ``interface.Controller``."""
        limit = self._state.host.limits.pre_s
        answer = pre_process_answer(self._call(self._pre, limit, "pre_process", b"{}"))
        if answer is SUSPEND:
            self._count()
        return answer

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """See ``interface.Controller``."""
        state = self._state
        argument = self._alone if len(fork_group) == 1 else mid_process_argument(fork_group)
        state.mask, state.masked = mask, False
        try:
            result = self._call(self._mid, state.host.limits.mid_s, "mid_process", argument)
        finally:
            state.mask = None
        self._count()
        return mid_process_answer(result, state.masked, state.host.vocabulary.size)

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """See ``interface.Controller``."""
        had = self._state.tokens
        if had is not None:
            del had[len(had) - backtrack :]
            had.extend(tokens)
        argument = post_process_argument(tokens, backtrack)
        limit = self._state.host.limits.post_s
        return post_process_answer(self._call(self._post, limit, "post_process", argument))

    def fork(self, host: Host) -> Controller:
        """See ``interface.Controller``."""
        if self._why_no_fork is not None:
            raise ControllerError(
                Code.CONTROLLER_FAILED, f"this module cannot fork: {self._why_no_fork}"
            )
        mine, state = self._state, AiciState(host)
        state.blobs = list(mine.blobs)
        if mine.tokens is not None:
            state.tokens = mine.tokens[:]
        state.guest = guest = self._guest.clone(state, host.limits)
        return AiciController(guest, state, self._handle, self._why_no_fork)

    def close(self) -> None:
        """See ``interface.Controller``."""
        self._guest.close()

    def _count(self) -> None:
        """Counts the memory of the guest, and the blobs that the host stores for the guest, towards
        the tenant's share."""
        blobs = self._state.blobs
        self._guest.host_bytes = sum([len(blobs[kind] or b"") for kind in _MADE])
        self._guest.count()

    def _call(self, function: Any, limit_s: float, name: str, argument: bytes) -> bytes:
        """Calls a function of the guest with the JSON ``argument``, and returns the JSON of the
        result."""
        state = self._state
        state.blobs[_PROCESS_ARG] = argument
        state.result = None
        state.last_words = b""
        self._guest.call_with(function, limit_s, name, self._handle)
        result: bytes | None = state.result
        state.result = None
        if result is None:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"{name} returned without a result: aici_{name} has to call "
                "aici_host_return_process_result",
            )
        return result


# --- the functions that a guest may import --------------------------------------------------------


def _read_blob(state: AiciState, blob: int, into: int, size: int) -> int:
    blobs = state.blobs
    data = blobs[blob] if blob < len(blobs) else None
    if data is None:
        kind = _KINDS.get(blob)
        why = f"{kind}, before it existed" if kind else "which does not exist"
        raise ControllerError(Code.CONTROLLER_FAILED, f"the guest read blob {blob}, {why}")
    state.guest.charge(min(size, len(data)))
    state.guest.write_part(into, data, size)
    return len(data)


def _module_arg(state: AiciState) -> int:
    return _MODULE_ARG


def _process_arg(state: AiciState) -> int:
    return _PROCESS_ARG


def _token_trie(state: AiciState) -> int:
    state.blobs[_TRIE] = state.host.vocabulary.trie
    return _TRIE


def _tokenize(state: AiciState, address: int, size: int) -> int:
    tokens = tokenized(state.guest, state.host, address, size)
    state.blobs[_TOKENIZED] = array.array("I", tokens).tobytes()
    return _TOKENIZED


def _tokens(state: AiciState) -> int:
    state.guest.charge(4 * len(state.tokens or ()))
    state.blobs[_TOKENS] = state.tokens.tobytes() if state.tokens is not None else b""
    return _TOKENS


def _storage_cmd(state: AiciState, address: int, size: int) -> int:
    limit = state.host.limits.variable_bytes
    _check_size("a storage command", size, max_bytes(limit))
    # The factor accounts for decoding the JSON, and for decoding its value from hexadecimal.
    state.guest.charge(8 * size)
    command = state.guest.read(address, size)
    answer = run_command(command, state.host.variables, limit)
    # The bytes of the answer are counted too, because a short command may read a long value.
    state.guest.charge(4 * len(answer))
    state.blobs[_STORAGE] = answer
    return _STORAGE


def _return_process_result(state: AiciState, address: int, size: int) -> None:
    if size > RESULT_BYTES:
        _check_size("a result", size, RESULT_BYTES)
    state.guest.charge(size)
    state.result = state.guest.read(address, size)


def _return_logit_bias(state: AiciState, address: int) -> None:
    mask, mask_type, guest = state.mask, state.mask_type, state.guest
    if mask is None:
        raise ControllerError(
            Code.CONTROLLER_FAILED,
            "aici_host_return_logit_bias was called outside of aici_mid_process; only "
            "aici_mid_process can restrict the next token",
        )
    guest.check(address, ctypes.sizeof(mask_type))
    mask[:] = memoryview(mask_type.from_address(guest.base + address)).cast("B")
    state.masked = True


def _self_seq_id(state: AiciState) -> int:
    return state.host.seq


def _eos_token(state: AiciState) -> int:
    return state.host.vocabulary.eos


def _special_token(state: AiciState, number: int) -> int:
    return special_token(state.host, number)


def _get_config(state: AiciState, address: int, size: int) -> int:
    return int(state.guest.read(address, min(size, 64)) in CONFIG)


def _stop(state: AiciState) -> None:
    words = state.last_words.decode("utf-8", "replace").strip()
    raise ControllerError(
        Code.CONTROLLER_FAILED,
        words or "it stopped itself with aici_host_stop, and logged nothing in this call",
    )


def _fd_write(state: AiciState, fd: int, pieces: int, count: int, written_at: int) -> int | None:
    """Implements ``fd_write`` of WASI, and stores the last written bytes for ``_stop``."""
    said = WASI[WASI_MODULE, "fd_write"].call(state, fd, pieces, count, written_at)
    if said == OK:
        guest = state.guest
        words = [state.last_words]
        for address, size in struct.iter_unpack(
            "<II", guest.read(pieces, 8 * min(count, MAX_PIECES))
        ):
            kept = min(size, LAST_WORDS_BYTES)
            words.append(guest.read(address + size - kept, kept))
        state.last_words = b"".join(words)[-LAST_WORDS_BYTES:]
    return said


def _check_size(what: str, size: int, most: int) -> None:
    if size > most:
        raise ControllerError(
            Code.CONTROLLER_FAILED, f"{what} may have at most {most} bytes; this one has {size}"
        )


FUNCTIONS: dict[tuple[str, str], HostFunction] = {
    ("env", "aici_host_read_blob"): HostFunction("iii", "i", _read_blob),
    ("env", "aici_host_token_trie"): HostFunction("", "i", _token_trie),
    ("env", "aici_host_module_arg"): HostFunction("", "i", _module_arg),
    ("env", "aici_host_process_arg"): HostFunction("", "i", _process_arg),
    ("env", "aici_host_return_process_result"): HostFunction("ii", "", _return_process_result),
    ("env", "aici_host_return_logit_bias"): HostFunction("i", "", _return_logit_bias),
    ("env", "aici_host_tokenize"): HostFunction("ii", "i", _tokenize),
    ("env", "aici_host_self_seq_id"): HostFunction("", "i", _self_seq_id),
    ("env", "aici_host_eos_token"): HostFunction("", "i", _eos_token),
    ("env", "aici_host_special_token"): HostFunction("i", "i", _special_token),
    ("env", "aici_host_storage_cmd"): HostFunction("ii", "i", _storage_cmd),
    ("env", "aici_host_stop"): HostFunction("", "", _stop),
    ("env", "aici_host_tokens"): HostFunction("", "i", _tokens),
    ("env", "aici_host_get_config"): HostFunction("ii", "i", _get_config),
    **WASI,
    (WASI_MODULE, "fd_write"): HostFunction("iiii", "i", _fd_write),
}
"""The functions of modules ``env`` and ``wasi_snapshot_preview1`` that AICI guests may import."""

_linker = linkers(FUNCTIONS)
