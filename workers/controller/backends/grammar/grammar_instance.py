"""Runs a grammar over a vocabulary in a Wasm guest, for all sequences of a worker that have this
grammar and this vocabulary.

All these sequences share the guest's cache of masks. The key of a mask is the lexer state and the
part of the parser's stack on which the mask depends. The guest's source is in ``grammars/guest``.
"""

from __future__ import annotations

import array
import ctypes
import itertools
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
"""Maximum bytes of memory of one guest. A vocabulary of 131,072 tokens takes 8 MB, and the rest is
for masks. When the memory is full, the cache of masks is cleared."""
OPEN_S = 5.0
"""Limit on reading the vocabulary and the tables, in seconds of CPU time."""
MASK_S = 2.0
"""Limit on every other call, for example on computing one mask, in seconds of CPU time. The first
mask in a lexer state takes milliseconds."""

ANY: Final = 1
"""Flag of ``GrammarInstance.mask``: at least one token other than the end of the sequence is
allowed."""
FORCED: Final = 2
"""Flag: the next byte is forced. Only one byte can come next, the text is not complete, and every
allowed token is a prefix of the longest allowed token."""
COMPLETE: Final = 4
"""Flag: the text may end here."""
SINGLE: Final = 8
"""Flag: ``FORCED``, and only one token is allowed."""

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
    """The first argument of the guest's host function ``fail``: it gives access to the guest's
    memory."""

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
    """A running instance of a grammar. Thread-safe: a lock serializes its calls.

    ``place`` is the number of a sequence in the instance. Every failure raises ControllerError. If
    ``dead`` is true, the guest has failed, and so have all sequences of the instance.
    """

    def __init__(
        self,
        module: GrammarModule,
        vocabulary: Vocabulary,
        tables: bytes,
        memory: memoryview | None = None,
    ) -> None:
        """``tables`` comes from ``Dfa.to_bytes`` or ``CompiledGrammar.to_bytes``; ``memory`` is a
        snapshot that ``memory()`` took of an instance with the same module, vocabulary and
        tables."""
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
                *("append", "mask", "rounds", "complete", "forced", "overhang", "closing"),
            )
        }
        words = -(-vocabulary.size // 32)
        self._mask = ctypes.c_char * (4 * words)
        self._views: dict[int, memoryview] = {}
        """Masks by their address. The addresses stay valid, because the guest's memory does not
        move."""
        try:
            if memory is not None:
                guest.restore(memory)
            at = guest.call(self._functions["block"], OPEN_S, "grammar_block")
            self._block = (ctypes.c_uint32 * 16).from_address(guest.base + at)
            inbox = guest.base + self._block[_INBOX]
            self._inbox = ctypes.c_uint32.from_address(inbox)
            pairs = self._block[_INBOX_BYTES] // 8
            self._pairs = (ctypes.c_uint32 * (2 * pairs)).from_address(inbox)
            if memory is not None:
                self._call("wake", OPEN_S)
            else:
                self._open(tables)
        except BaseException:
            guest.close()
            raise

    # --- sequences ------------------------------------------------------------------------------

    def start(self) -> int:
        """Adds a sequence with an empty text; returns the sequence's number."""
        with self._lock:
            return self._place("start", 0)

    def fork(self, place: int) -> int:
        """Adds a copy of a sequence; returns the number of the copy."""
        with self._lock:
            return self._place("fork", place)

    def end(self, place: int) -> None:
        """Removes a sequence."""
        with self._lock:
            if not self.dead:
                self._block[_ARG] = place
                self._call("end")

    def append(self, place: int, tokens: Sequence[int]) -> int:
        """Appends tokens to a sequence's text, up to the first token that the grammar does not
        allow. Returns the number of appended tokens."""
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
        """Writes the mask of the next token into ``into``, bytes ``[4 * ceil(vocab / 32)]``. If the
        text is complete, the mask also allows the end of the sequence. Returns a combination of the
        flags ``ANY``, ``FORCED``, ``COMPLETE`` and ``SINGLE``."""
        with self._lock:
            self._alive()[_ARG] = place
            flags = self._call("mask")
            if flags < 0:
                raise ControllerError(
                    Code.CONTROLLER_FAILED,
                    "the text is nested deeper than the grammar engine can follow",
                )
            into[:] = self._found_mask()
            return flags

    def rounds(self, turns: Sequence[tuple[int, int]], masks: Sequence[memoryview]) -> list[bool]:
        """Appends one token to each of several sequences and writes the masks of the next tokens,
        in one call. ``turns``: for each mask in ``masks``, the number of a sequence and its token.

        A sequence takes part only if its token can follow, and if its next mask is cached and has
        the flag ``ANY``. A mask with ``FORCED`` must also have ``SINGLE``, and the text after its
        single token must not be forced. Returns for each sequence whether it took part. A sequence
        that did not take part is unchanged.
        """
        with self._lock:
            block, pairs = self._alive(), self._pairs
            done: list[bool] = []
            for at in range(0, len(turns), len(pairs) // 2):
                part = turns[at : at + len(pairs) // 2]
                data = array.array("I", itertools.chain.from_iterable(part))
                ctypes.memmove(pairs, data.tobytes(), 4 * len(data))
                block[_COUNT] = len(part)
                self._call("rounds")
                addresses = pairs[1 : len(data) : 2]
                self._copy_masks(addresses, masks[at : at + len(part)])
                done += map(bool, addresses)
            return done

    def masks_along(self, place: int, draft: Sequence[int], masks: Sequence[memoryview]) -> int:
        """Writes the mask after each token of a draft; returns the number of masks written. Writing
        stops at a token that the grammar does not allow. It also stops at a token after which no
        token is allowed or a byte is forced. The sequence is unchanged."""
        with self._lock:
            self._alive()[_ARG] = place
            copy = self._call("fork")
            if copy < 0:
                return 0
            try:
                return self._write_along(copy, draft, masks)
            finally:
                if not self.dead:
                    self._block[_ARG] = copy
                    self._call("end")

    def complete(self, place: int) -> bool:
        """Whether the text so far is in the language of the grammar."""
        with self._lock:
            self._alive()[_ARG] = place
            return bool(self._call("complete"))

    def forced(self, place: int) -> list[int]:
        """The forced tokens, for jump-forward: the tokenization of the text that must come next.
        If the text of the last tokens may be the beginning of a longer allowed token, the last
        tokens are left out. The model can then sample the longer token."""
        with self._lock:
            self._alive()[_ARG] = place
            count = self._call("forced")
            text = self._guest.read(self._block[_OUT], count)
            try:
                tokens = self.vocabulary.tokenize(text)
            except ControllerError:
                return []  # The vocabulary cannot write the whole text, so the mask decides.
            at, kept = len(text), len(tokens)
            for number in range(len(tokens) - 1, -1, -1):
                at -= len(self.vocabulary.token(tokens[number]))
                self._block[_ARG] = at
                if self._call("overhang"):
                    kept = number
            return tokens[:kept]

    def closing(self, place: int) -> bytes | None:
        """Text that completes the text so far, with about as few bytes as possible; empty if the
        text is already complete. None if no such text was found, for example for a very deeply
        nested text."""
        with self._lock:
            self._alive()[_ARG] = place
            count = self._call("closing")
            return self._guest.read(self._block[_OUT], count) if count >= 0 else None

    # --- the guest as a whole -------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of the guest's memory. While a call of the guest runs, the last known number is
        returned, because waiting for the call may take up to ``MASK_S``."""
        if not self._lock.acquire(blocking=False):
            return self._guest.size
        try:
            return 0 if self.dead else self._guest.measure()
        finally:
            self._lock.release()

    @property
    def found(self) -> int:
        """Number of masks that the guest has computed since its memory was created. Masks from the
        cache are not counted."""
        with self._lock:
            return 0 if self.dead else self._block[_FOUND]

    def memory(self) -> bytes:
        """A snapshot of the guest's memory, with its cache of masks. An instance that is created
        from the snapshot does not have sequences."""
        with self._lock:
            self._alive()
            return self._guest.read(0, self._guest.measure())

    def close(self) -> None:
        """Frees the guest."""
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
                "this grammar has the maximum number of sequences on this worker; try again",
            )
        return place

    def _found_mask(self) -> memoryview:
        """The mask that was computed last, in the guest's memory."""
        return self._mask_at(self._block[_MASK])

    def _copy_masks(self, addresses: Sequence[int], masks: Sequence[memoryview]) -> None:
        try:
            for address, into in zip(addresses, masks, strict=True):
                if address:
                    into[:] = self._mask_at(address)
        except BaseException:
            # The guest has already appended the tokens, so the rounds cannot be repeated.
            self.dead = True
            raise

    def _mask_at(self, address: int) -> memoryview:
        found = self._views.get(address)
        if found is None:
            whole = self._mask.from_address(self._guest.base + address)
            found = self._views[address] = memoryview(whole).cast("B")
        return found

    def _write_along(self, place: int, draft: Sequence[int], masks: Sequence[memoryview]) -> int:
        block = self._block
        for number, (token, into) in enumerate(zip(draft, masks, strict=False)):
            self._inbox.value = token
            block[_ARG], block[_COUNT] = place, 1
            if not self._call("append"):
                return number
            block[_ARG] = place
            flags = self._call("mask")
            if flags < 0 or flags & FORCED or not flags & ANY:
                return number
            into[:] = self._found_mask()
        return min(len(draft), len(masks))

    def _alive(self) -> ctypes.Array[ctypes.c_uint32]:
        """The words through which host and guest exchange arguments and results. Raises
        ControllerError if the guest has failed."""
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
