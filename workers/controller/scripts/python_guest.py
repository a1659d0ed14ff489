"""Scripts in MicroPython. The worker answers a script's calls with ``Context``, as it does for the
operator's scripts.

A fork copies the memory of the interpreter, so no answers are recorded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import wasmtime

from ....protocol.decoders import json_decoder
from ....protocol.errors import Code, ControllerError, TokenbusError
from ..guest_clock import call_cpu_s
from ..host import Host, Stored, Written
from ..interface import Controller
from ..limits import Limits
from ..python.author_calls import AuthorCalls
from ..python.bias_values import bias_of
from ..python.context import Context, Label
from ..python.delegated_text import Delegated, text_of_options
from ..python.generated_text import Generated, text_of_answer
from ..python.operations import Operation
from ..python.script import Script, ScriptController
from ..python.transcript import Question, Transcript
from ..wasm.instance import Template
from .python_decisions import STEPS, step_of
from .python_session import (
    RESULT_BYTES,
    Asked,
    Image,
    Printed,
    PythonSession,
    library,
    template_of,
)

TOKENS_READ = 256
"""Number of tokens whose bytes a script reads at once, for ``ctx.token_set``."""


class PythonModule:
    """Starts a script for each sequence, in a new interpreter."""

    def __init__(
        self, engine: wasmtime.Engine, module: wasmtime.Module, text: bytes | None
    ) -> None:
        """``text``: the script; None if the argument of the request is the script."""
        self._template = template_of(engine, module)
        self._text = text
        self._loaded: dict[str, Image] = {}
        """For the text of each library: the memory of an interpreter that has loaded this
        library."""

    def start(self, host: Host) -> Controller:
        """Returns a controller that runs the script from its beginning."""
        text = host.arg if self._text is None else self._text
        script = text.decode("utf-8", "replace")

        async def drive(ctx: Context) -> None:
            assert isinstance(ctx, PythonContext)
            if self._text is None:
                ctx.remove_arg()
            await ctx.run(self._template, script, lambda: self._load(library(script), host.limits))

        return PythonGuest("the script", drive, host, _Tokens())

    def check(self, limits: Limits) -> None:
        """Compiles the script without running it; raises ControllerError with the position of a
        syntax error."""
        script = (self._text or b"").decode()
        session = PythonSession(self._template, _SILENT, None)
        session.begin(limits)
        try:
            session.resume(f"{library(script)}\n_turn = _only_compile", None, 0.0)
            asked = session.resume(script, None, 0.0)
        finally:
            session.close()
        if asked is not None:
            raise ControllerError(Code.CONTROLLER_FAILED, asked.text)

    def _load(self, text: str, limits: Limits) -> Image:
        """The memory of an interpreter that has loaded the library ``text``."""
        if text not in self._loaded:
            session = PythonSession(self._template, _SILENT, None)
            session.begin(limits)
            try:
                session.resume(text, None, 0.0)
                self._loaded[text] = session.image()
            finally:
                session.close()
        return self._loaded[text]


class _Tokens(Transcript):
    """The tokens of a script's sequence. The script's calls are not recorded, because a fork does
    not replay the script."""

    def add(self, question: Question, answer: object, error: ControllerError | None = None) -> None:
        """Does nothing."""

    def branch(self) -> _Tokens:
        """Returns a copy for a forked sequence."""
        copied = _Tokens()
        copied.tokens, copied.prompt_length = list(self.tokens), self.prompt_length
        return copied


class _Origin(NamedTuple):
    """The state of a script that forks."""

    image: Image
    asked: Asked
    """The call that forks."""


class PythonContext(Context):
    """The context of a script in MicroPython. A call of the script has the name of a method of this
    class."""

    calls: GuestCalls
    origin: _Origin | None = None
    """The state of the script at the fork that created this sequence. It is set before the script
    begins. None if no fork created this sequence."""

    @property
    def limits(self) -> Limits:
        """The limits of this sequence. A forked sequence may have other limits than its parent."""
        return self._host.limits

    def remove_arg(self) -> None:
        """Removes the argument of the sequence, because the argument is the script itself."""
        self._host.arg = b""

    async def run(self, template: Template, script: str, loaded: Callable[[], Image]) -> None:
        """Runs the script from its beginning, in an interpreter with the memory that ``loaded``
        returns. In a forked sequence, the script instead continues from the call that forked, in an
        interpreter with a copy of the parent's memory."""
        session = self._session = PythonSession(
            template, Printed(self._host.log.write), self._host.memory
        )
        origin, self.origin = self.origin, None
        try:
            session.begin(self.limits, loaded() if origin is None else origin.image)
            asked = session.resume(script, None, 0.0) if origin is None else origin.asked
            # The parent's image is freed here. It can be as large as the memory of an interpreter,
            # but does not count towards the memory of the tenant.
            del origin
            while asked is not None:
                self._asked = asked
                asked = await self._step_script(session, asked)
        finally:
            session.close()

    def branch(self) -> _Origin:
        """Returns the state from which a forked sequence continues the script."""
        return _Origin(self._session.image(), self._asked)

    async def _step_script(self, session: PythonSession, asked: Asked) -> Asked | None:
        """Answers a call of the script, and runs the script to its next call.

        All work of the script during one call of its controller counts towards one limit.
        """
        number, began_s = self.calls.number, call_cpu_s()
        answer = await self.answer(asked)
        limit_s = self.limits.script_s if number != self.calls.number else None
        return session.resume(answer, limit_s, call_cpu_s() - began_s)

    async def answer(self, asked: Asked) -> str:
        """The answer to a call of the script, as JSON. Raises ControllerError if the script has
        failed."""
        if asked.name == "failed":
            raise ControllerError(Code.CONTROLLER_FAILED, asked.text)
        name, args, kwargs = json_decoder(tuple[str, list[Any], dict[str, Any]]).decode(asked.text)
        given = [_made(each) for each in args]
        named = {key: _made(each) for key, each in kwargs.items()}
        value: Any = None
        try:
            if name == "gen":
                value = await self._generate(*given, **named)
            elif name == "fixed":
                await self.fixed(self._short("fixed", given[0]), *given[1:], **named)
            elif name in STEPS:
                value = await self._step(name, *given)
            elif name == "score":
                value = await self._score(*given, **named)
            elif name == "spawn":
                [prompt] = given
                value = await self.spawn(
                    prompt if isinstance(prompt, list) else self._short("spawn", prompt)
                )
            elif name == "call":
                value = (await self._call(given[0], named)).decode()
            elif name in _AWAITED:
                value = await getattr(self, name)(*given, **named)
            else:
                value = self._read(name, given)
        except (TokenbusError, TypeError, IndexError) as error:
            said = error.message if isinstance(error, TokenbusError) else str(error)
            return json.dumps({"error": said})
        return json.dumps({"value": _plain(value)})

    def _read(self, name: str, given: list[Any]) -> Any:
        """Returns the result of a call that is answered at once, without an ``Operation``."""
        vocabulary = self._host.vocabulary
        match name:
            case "prompt" | "tokens" | "seq":
                return getattr(self, name)
            case "label" | "tokens_since" | "text_since" | "special_token":
                return getattr(self, name)(*given)
            case "send":
                return self.send(*given)
            case "vars.read" | "vars.get" | "vars.set" | "vars.append":
                return getattr(self.vars, name.removeprefix("vars."))(*given)
            case "next_tokens":
                return self._next_tokens(*given)
            case "arg":
                return json.dumps(self.arg)
            case "size":
                return vocabulary.size
            case "eos":
                return vocabulary.eos
            case "tokenize":
                text = self._short("tokenize", given[0])
                return vocabulary.tokenize(text.encode() if isinstance(text, str) else text)
            case "detokenize":
                return self._text(given[0])
            case "replaced":
                return self._text(given[0]).decode("utf-8", "replace")
            case "token_bytes":
                numbers = range(given[0], given[0] + TOKENS_READ)
                pieces = [vocabulary.token(number) for number in numbers]
                return [[len(piece) for piece in pieces], b"".join(pieces)]
        raise ControllerError(Code.CONTROLLER_FAILED, f"the context has no call {name!r}")

    def _text(self, tokens: list[int]) -> bytes:
        """The bytes of tokens. Raises ControllerError before the text becomes longer than an answer
        to the script may be, because a script may pass millions of long tokens."""
        text = bytearray()
        for at in range(0, len(tokens), TOKENS_READ):
            text += b"".join(map(self._host.vocabulary.token, tokens[at : at + TOKENS_READ]))
            if len(text) > RESULT_BYTES:
                raise _wrong(
                    f"the text of {len(tokens)} tokens is too long; at most {RESULT_BYTES} bytes "
                    "are allowed"
                )
        return bytes(text)

    def _next_tokens(self, kind: str, argument: str, text: list[int]) -> list[Any]:
        """The tokens that a constraint allows after ``text``."""
        questions = self._host.questions
        if questions is None:
            raise _wrong("this worker has no constraints")
        return list(questions.next_tokens(kind, argument, text))

    async def _step(self, name: str, *given: Any) -> Any:
        """Performs a step that the script decides itself, and returns its result."""
        return await self._ask(partial(step_of, self._host, name, given), name)

    async def _score(self, candidates: Any, **named: Any) -> list[Any]:
        """Answers ``score``."""
        texts = candidates if isinstance(candidates, list) else [candidates]
        data = [t.encode() if isinstance(t, str) else t for t in texts]
        self._short("score", b"".join(each for each in data if isinstance(each, bytes)))
        return await self.score(candidates, **named)

    def _short(self, call: str, text: Any) -> Any:
        """Returns ``text``; raises ControllerError if the text is too long to be tokenized in one
        call."""
        if not isinstance(text, str | bytes):
            raise _wrong(f"{call}(text) with {text!r}; expected text or bytes")
        size = len(text.encode() if isinstance(text, str) else text)
        most = self.limits.max_text(self.limits.script_s)
        if size > most:
            raise _wrong(
                f"the text to tokenize has {size} bytes; at most {most} are allowed at once"
            )
        return text

    async def _generate(self, *unnamed: Any, **given: Any) -> str | Generated:
        """Answers ``gen``: the worker generates a text and applies its constraint."""
        if unnamed:
            raise _wrong(f"gen({unnamed[0]!r}) has no name; expected an option such as regex=…")
        if given.get("allow") is not None:
            found: str | Generated = await self.gen(**given)
            return found
        options = {key: value for key, value in given.items() if value is not None}
        host = self._host
        bias = bias_of(options.pop("bias", None), host.vocabulary.size, "gen(bias=…)")
        asked = text_of_options(options)

        def make(question: Question) -> Operation:
            return Delegated(question, host, asked, bias)

        return text_of_answer(await self._ask(make, "gen"))


_AWAITED = ("distribution", "fork", "save", "open", "wait_var", "receive", "stop")
_SILENT = Printed(lambda data: None)


class GuestCalls(AuthorCalls):
    """The calls to the script of one sequence. Errors have no traceback, because the interpreter
    already describes the errors of its script."""

    number = 0
    """Number of calls so far."""

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Wraps one call. Any exception becomes a ControllerError."""
        self.number += 1
        try:
            yield
        except TokenbusError:
            raise
        except Exception as error:
            said = f"{call}: {type(error).__name__}: {error}"
            raise ControllerError(Code.CONTROLLER_FAILED, said) from error


class PythonGuest(ScriptController):
    """The controller of one sequence, whose script runs in MicroPython."""

    context = PythonContext
    _context: PythonContext
    _transcript: _Tokens

    def __init__(self, name: str, function: Script, host: Host, transcript: _Tokens) -> None:
        super().__init__(name, function, host, transcript)
        self._calls = self._context.calls = GuestCalls(name, host)

    def fork(self, host: Host) -> Controller:
        """A controller for the forked sequence, whose interpreter has a copy of the memory."""
        if self._operation is None:
            return PythonGuest(self._name, self._function, host, _Tokens())
        child = PythonGuest(self._name, self._function, host, self._transcript.branch())
        try:
            with child._calls.during("fork"):
                child._context.origin = self._context.branch()
                child._resume()
                assert child._operation is not None
                child._operation.resume(self._operation)
        except BaseException:
            child.close()
            raise
        return child


def _made(value: Any) -> Any:
    """Decodes a value that the script has sent as JSON."""
    if isinstance(value, list):
        return [_made(each) for each in value]
    match value:
        case {"$bytes": str(data)}:
            return bytes.fromhex(data)
        case {"$label": int(position)}:
            return Label(position)
        case {"$dict": list(items)}:
            return {_made(key): _made(each) for key, each in items}
    return value


def _plain(value: Any) -> Any:
    """Converts a value for the script to types of JSON."""
    match value:
        case bytes():
            return {"$bytes": value.hex()}
        case Label():
            return {"$label": value.position}
        case Stored():
            return {"$stored": [value.version, _plain(value.value)]}
        case Written():
            return {"$written": [value.ok, value.version, _plain(value.value)]}
        case Generated():
            return {"$generated": list(value)}
        case list():
            return [_plain(each) for each in value]
    return value


def _wrong(message: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, message)
