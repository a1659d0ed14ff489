"""Guests that run scripts in JavaScript. Each guest is an instance of QuickJS, which has the native
ABI (``wasm/native.py``) and loads one script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

import msgspec
import numpy as np
import wasmtime

from ....protocol.decoders import json_decoder
from ....protocol.errors import Code, ControllerError
from ....protocol.sampling import Query
from .. import interface
from ..host import Host
from ..interface import Action, Answer, Controller
from ..limits import Limits
from ..queries import checked_query
from ..scoring import checked_texts
from ..wasm.instance import Guest, Template
from ..wasm.native import START, NativeController, NativeState
from .engines import BACKTRACK, put_text, words
from .imports import linker_of

GENERATE = 5
"""The result of mid_process if the script requests a text that the worker generates. Words 8 and 9
of the call block then have the size and the address of a ``generation.Generate`` as JSON."""
SCORE = 6
"""The result of mid_process if texts are to be scored. Words 8 and 9 then have the size and the
address of the texts as JSON: lists of token ids. The arguments of the next post_process are the
log-probabilities, as the bits of float32 numbers."""
BEGIN, SAVE, OPEN, LOOK, AGAIN = 7, 8, 9, 10, 11
"""Results of mid_process, with an argument at the address in words 8 and 9.

- BEGIN: the sequence begins again with the prompt in the argument.
- SAVE, OPEN: a context is saved or opened. The argument is a ``_Context`` as JSON.
- LOOK: the script reads the distribution of the next token. The argument is the number of tokens to
  report, as JSON. Then the arguments of post_process are pairs of a token and the bits of its
  log-probability.
- AGAIN: the worker calls pre_process again. There is no argument."""
SAMPLE_SCORED = 12
"""The result of mid_process if the next token is sampled and the script asks for its
log-probability."""
REFUSED = 0xFFFF_FFFF
"""The value that post_process receives in place of the number of dropped tokens, if a text or a
context is refused. The tokens are then the bytes of the reason."""
SCORED = 0xFFFF_FFFE
"""The value that post_process receives in place of the number of dropped tokens, if the tokens'
log-probabilities follow the tokens. The log-probabilities are the bits of float32 numbers. NaN
stands for a token that was not sampled."""
MAX_GENERATE_BYTES = 2 * 1024 * 1024


class _Context(msgspec.Struct):
    """A context to save or to open."""

    name: str
    tokens: list[int] = []
    pin_s: float = 0.0


_decode_texts = json_decoder(list[list[int]]).decode
_decode_context = json_decoder(_Context).decode


class ScriptModule:
    """Starts a script for each sequence, in a new instance of the interpreter."""

    def __init__(
        self, engine: wasmtime.Engine, module: wasmtime.Module, text: bytes | None
    ) -> None:
        """``module``: the interpreter after its boot. ``text``: the script; None if the argument of
        the request is the script."""
        self._template = Template(linker_of(engine), module, engine)
        self._text = text

    def start(self, host: Host) -> Controller:
        """Creates an instance and runs the script, which defines ``main``."""
        text = self._text
        if text is None:
            # The argument is removed from the host itself and not from a copy, because a copy would
            # not get later limits and distributions.
            text, host.arg = host.arg, b""
        state = NativeState(host)
        guest = state.guest = Guest(self._template, state, host.limits, host.memory)
        try:
            block = guest.call(guest.function(START), host.limits.init_s, START) & 0xFFFF_FFFF
            controller = ScriptGuest(guest, host, block, None)
            load(guest, block, text + LAST_LINE, host.limits.init_s)
            return controller
        except BaseException:
            guest.close()
            raise

    def check(self, limits: Limits) -> None:
        """Compiles the script without running it; raises ControllerError with the position of a
        syntax error."""
        state = NativeState(None)  # type: ignore[arg-type]
        guest = state.guest = Guest(self._template, state, limits)
        block = guest.call(guest.function(START), limits.init_s, START) & 0xFFFF_FFFF
        words(guest, block)[BACKTRACK] = 1
        load(guest, block, self._text or b"", limits.init_s)
        guest.free()


LAST_LINE = (
    b"\n;globalThis.__script = {main: typeof main === 'undefined' ? undefined : main, "
    b"Main: typeof Main === 'undefined' ? undefined : Main};"
)
"""Code that follows a script, and passes ``main`` and ``Main`` to the interpreter's library. A
script is a module, so its names are not global."""


def load(guest: Guest, block: int, text: bytes, limit_s: float) -> None:
    """Loads a script into an instance of an interpreter."""
    put_text(guest, block, text, limit_s)
    guest.call(guest.function("tokenbus_script"), limit_s, "the script")


class ScriptGuest(NativeController):
    """The guest of one sequence. All calls of a script except init_prompt have the same limit on
    their CPU time."""

    _shown_as = "the script"

    def _limit(self, own_s: float) -> float:
        return self._host.limits.script_s

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Passes tokens, log-probabilities or a refusal to the script."""
        if self._host.refusal:
            tokens, backtrack = list(self._host.refusal.encode()), REFUSED
        elif self._host.scores:
            scores = np.fromiter(chain.from_iterable(self._host.scores), np.float32)
            tokens = scores.view(np.uint32).tolist()
        elif self._host.logprobs:
            found = [math.nan if each is None else each for each in self._host.logprobs]
            tokens = [*tokens, *np.array(found, np.float32).view(np.uint32).tolist()]
            backtrack = SCORED
        elif self._host.distributions and not tokens:
            top = self._host.distributions[0].top
            logprobs = np.fromiter(top.values(), np.float32).view(np.uint32).tolist()
            tokens = list(chain.from_iterable(zip(top, logprobs, strict=True)))
        return super().post_process(tokens, backtrack)

    def _other_answer(self, action: int, mask: memoryview) -> Answer:
        if action == AGAIN:
            return interface.AGAIN
        if action == SAMPLE_SCORED:
            return self._sampling(mask)._replace(logprobs=True)
        if action == BEGIN:
            return Answer(Action.BEGIN, tokens=self._tokens())
        if action not in (GENERATE, SCORE, SAVE, OPEN, LOOK):
            return super()._other_answer(action, mask)
        address, size = self._list()
        if size > MAX_GENERATE_BYTES:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the arguments of a call have {size} bytes; at most {MAX_GENERATE_BYTES} are "
                "allowed",
            )
        generate = self._guest.read(address, size)
        if action != GENERATE:
            try:
                return self._of_json(action, generate)
            except msgspec.MsgspecError as error:
                call = Action(action).name.lower()
                raise ControllerError(Code.CONTROLLER_FAILED, f"{call}: {error}") from None
        return Answer(Action.GENERATE, bias=self._own_bias(), generate=generate)

    def _of_json(self, action: int, given: bytes) -> Answer:
        """Converts the JSON of a script's call to an ``Answer``. The call scores texts, reads a
        distribution, or saves or opens a context. Raises MsgspecError and ControllerError."""
        if action == SCORE:
            texts = checked_texts(_decode_texts(given), self._host.vocabulary.size)
            return Answer(Action.SCORE, texts=texts)
        if action == LOOK:
            query = Query(json_decoder(int).decode(given))
            return Answer(Action.LOOK, query=checked_query(query, self._host.vocabulary.size))
        context = _decode_context(given)
        name, pin_s = context.name, context.pin_s
        return Answer(Action(action), tokens=context.tokens, name=name, pin_s=pin_s)
