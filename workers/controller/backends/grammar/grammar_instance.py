"""The guest that runs one grammar over one vocabulary, for all sequences of a worker.

What is found out for one sequence is known to all: masks are looked up wherever the lexer state and
as much of the parser's stack as matters were seen before. The guest is ``grammars/guest``.
"""

from __future__ import annotations

import array
import ctypes
import threading
from collections.abc import Sequence
from typing import Final

import wasmtime

from .....grammars.guest import wasm
from .....protocol.errors import Code, ControllerError
from ...host import Vocabulary
from ...limits import Limits
from ...wasm.host_functions import HostFunction, make_linker
from ...wasm.instance import Guest, Template

MEMORY_BYTES = 128 * 1024 * 1024
"""Of one guest: the vocabulary takes 8 MB of it at 131,072 tokens, the rest is for masks. When it
is full, all masks are forgotten."""
OPEN_S = 5.0
"""CPU time that a guest may take to read vocabulary and tables, in seconds."""
MASK_S = 2.0
"""CPU time of one mask, in seconds. The first one in a lexer state takes milliseconds."""

ANY: Final = 1
"""Of ``GrammarInstance.mask``: some token is allowed, the end of the sequence apart."""
FORCED: Final = 2
"""The next byte can only be one, and the text is not complete."""
COMPLETE: Final = 4
"""The text may end here."""

(
    _INBOX,
    _INBOX_BYTES,
    _ARG,
    _COUNT,
    _TRIE,
    _TABLES,
    _TABLE_BYTES,
    _EOS,
    _MASK,
    _FOUND,
    _OUT,
) = range(11)


class _Caller:
    """What the guest's host function works with."""

    guest: Guest


def _fail(caller: _Caller, address: int, size: int) -> None:
    text = caller.guest.read(address, min(size, 4096)).decode("utf-8", "replace")
    raise ControllerError(Code.CONTROLLER_FAILED, text)


class GrammarModule:
    """The guest's code, compiled for one Wasm engine."""

    def __init__(self, engine: wasmtime.Engine) -> None:
        self.wasm = wasm()
        linker = make_linker(engine, {("tokenbus", "fail"): HostFunction("ii", "", _fail)})
        self.template = Template(linker, wasmtime.Module(engine, self.wasm), engine)


class GrammarInstance:
    """A grammar at work. Safe from any thread: one call at a time.

    A sequence is a number, its place. Whatever fails raises ControllerError; where that was the
    guest itself (``dead``), all its sequences have failed.
    """

    def __init__(
        self,
        module: GrammarModule,
        vocabulary: Vocabulary,
        tables: bytes,
        memory: memoryview | None = None,
    ) -> None:
        """``tables`` is what ``Dfa.to_bytes`` or ``CompiledGrammar.to_bytes`` gives; ``memory``
        what ``memory`` gave of a guest of the same module, vocabulary and tables."""
        self.vocabulary = vocabulary
        self.dead = False
        self._lock = threading.Lock()
        caller = _Caller()
        limits = Limits(init_s=OPEN_S, memory_bytes=MEMORY_BYTES)
        self._guest = guest = caller.guest = Guest(module.template, caller, limits)
        self._functions = {
            name: guest.function(f"grammar_{name}")
            for name in (
                *("block", "reserve", "open", "wake", "start", "fork", "end"),
                *("append", "mask", "complete", "forced", "overhang", "closing"),
            )
        }
        words = -(-vocabulary.size // 32)
        self._mask = ctypes.c_char * (4 * words)
        self._views: dict[int, memoryview] = {}
        """Masks by address: its memory stays where it is."""
        try:
            if memory is not None:
                guest.restore(memory)
            at = guest.call(self._functions["block"], OPEN_S, "grammar_block")
            self._block = (ctypes.c_uint32 * 16).from_address(guest.base + at)
            inbox = guest.base + self._block[_INBOX]
            self._inbox = ctypes.c_uint32.from_address(inbox)
            if memory is not None:
                self._call("wake", OPEN_S)
            else:
                self._open(tables)
        except BaseException:
            guest.close()
            raise

    # --- sequences ------------------------------------------------------------------------------

    def start(self) -> int:
        """A new sequence, at the beginning of its text."""
        with self._lock:
            return self._place("start", 0)

    def fork(self, place: int) -> int:
        """A new sequence, where another one stands."""
        with self._lock:
            return self._place("fork", place)

    def end(self, place: int) -> None:
        """A sequence is over."""
        with self._lock:
            if not self.dead:
                self._block[_ARG] = place
                self._call("end")

    def append(self, place: int, tokens: Sequence[int]) -> int:
        """Adds tokens to a sequence's text, as far as they can follow; how many could."""
        with self._lock:
            block = self._alive()
            if len(tokens) == 1:
                self._inbox.value = tokens[0]
                block[_ARG], block[_COUNT] = place, 1
                return self._call("append")
            taken = 0
            most = block[_INBOX_BYTES] // 4
            while taken < len(tokens):
                part = tokens[taken : taken + most]
                data = array.array("I", part).tobytes()
                ctypes.memmove(self._guest.base + block[_INBOX], data, len(data))
                block[_ARG] = place
                block[_COUNT] = len(part)
                count = self._call("append")
                taken += count
                if count < len(part):
                    break
            return taken

    def mask(self, place: int, into: memoryview) -> int:
        """Writes what may come next into ``into``, bytes ``[4 * ceil(vocab / 32)]``, the end of the
        sequence with it where the text is complete; ``ANY``, ``FORCED`` and ``COMPLETE``."""
        with self._lock:
            self._alive()[_ARG] = place
            flags = self._call("mask")
            if flags < 0:
                raise ControllerError(
                    Code.CONTROLLER_FAILED, "the text is nested too deeply to be followed"
                )
            address = self._block[_MASK]
            found = self._views.get(address)
            if found is None:
                whole = self._mask.from_address(self._guest.base + address)
                found = self._views[address] = memoryview(whole).cast("B")
            into[:] = found
            return flags

    def complete(self, place: int) -> bool:
        """Whether the text so far is one of the language."""
        with self._lock:
            self._alive()[_ARG] = place
            return bool(self._call("complete"))

    def forced(self, place: int) -> list[int]:
        """The tokens that must come next, as the tokenizer writes them: those that no longer token
        could stand for."""
        with self._lock:
            self._alive()[_ARG] = place
            count = self._call("forced")
            text = self._guest.read(self._block[_OUT], count)
            try:
                tokens = self.vocabulary.tokenize(text)
            except ControllerError:
                return []  # Some of it cannot be written: the mask says how far one gets.
            at, kept = len(text), len(tokens)
            for number in range(len(tokens) - 1, -1, -1):
                at -= len(self.vocabulary.token(tokens[number]))
                self._block[_ARG] = at
                if self._call("overhang"):
                    kept = number
            return tokens[:kept]

    def closing(self, place: int) -> list[int] | None:
        """Tokens that bring the text to its end, about as few as there can be; none where it is
        complete. None where none were found: some texts are too deep for that."""
        with self._lock:
            self._alive()[_ARG] = place
            count = self._call("closing")
            if count < 0:
                return None
            try:
                return self.vocabulary.tokenize(self._guest.read(self._block[_OUT], count))
            except ControllerError:
                return None

    # --- the guest as a whole -------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of its memory."""
        with self._lock:
            return 0 if self.dead else self._guest.measure()

    @property
    def found(self) -> int:
        """How many masks it has found since its memory was new; those looked up do not count."""
        with self._lock:
            return 0 if self.dead else self._block[_FOUND]

    def memory(self) -> bytes:
        """A copy of all that it has found out; sequences in it are over when it is used."""
        with self._lock:
            self._alive()
            return self._guest.read(0, self._guest.measure())

    def close(self) -> None:
        """Frees it."""
        with self._lock:
            self.dead = True
            self._guest.close()

    # --- inside ---------------------------------------------------------------------------------

    def _open(self, tables: bytes) -> None:
        block, guest, trie = self._block, self._guest, self.vocabulary.trie
        block[_ARG], block[_COUNT] = len(trie), len(tables)
        block[_EOS] = self.vocabulary.eos & 0xFFFF_FFFF
        self._call("reserve", OPEN_S)
        guest.write(block[_TRIE], trie)
        guest.write(block[_TABLES], tables)
        self._call("open", OPEN_S)

    def _place(self, name: str, arg: int) -> int:
        self._alive()[_ARG] = arg
        place = self._call(name)
        if place < 0:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                "this worker has as many sequences of this grammar as it can take; try again",
            )
        return place

    def _alive(self) -> ctypes.Array[ctypes.c_uint32]:
        """The block, where there still is one."""
        if self.dead:
            raise ControllerError(
                Code.CONTROLLER_FAILED, "the grammar failed for another sequence; try again"
            )
        return self._block

    def _call(self, name: str, limit_s: float = MASK_S) -> int:
        try:
            return self._guest.call(self._functions[name], limit_s, f"grammar_{name}")
        except BaseException:
            self.dead = True
            raise
