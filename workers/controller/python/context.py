"""The context of a script: the argument of ``async def main(ctx)``."""

from __future__ import annotations

import json
import sys
import types
import zlib
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Unpack, cast, overload

import msgspec

from ....protocol.errors import Code, ControllerError
from ....protocol.sampling import Query, Scores
from ..backends.compiling.bounds import RefusedGrammar
from ..host import Host, Stored, Variables, Written
from ..interface import Action, Answer
from ..queries import checked_query
from ..scoring import of_texts, texts_of
from ..scripts.generation import Generate as GeneratedText
from ..tool_calls import value_of
from . import script_constraints
from .arguments import parsed, special_token
from .author_calls import place
from .awaitable_calls import AwaitableCall, awaitable_call
from .bias_values import BiasValues, bias_of
from .delegated_text import Delegated, text_of_options
from .generated_text import Generated, GenerationOptions, text_of_answer
from .operations import (
    Append,
    Fork,
    Generate,
    Look,
    Operation,
    Receive,
    Replace,
    Score,
    Stop,
    WaitFor,
)
from .script_constraints import Allowed, Constraint, Grammar
from .text_variables import Vars, text_of
from .token_set import TokenSet
from .tool_operation import CallTool, encoded_arguments
from .transcript import Question, Transcript


@dataclass(frozen=True, slots=True)
class Label:
    """A position in the sequence: the number of tokens before it, including those of the prompt."""

    position: int


class Context:
    """The operations of a script on its sequence.

    Source: AICI's pyctrl (``FixedTokens``, ``gen_text``, ``Label``, ``fork``, ``wait_vars``). A
    script may take input only from its context, because a fork replays the script from its
    beginning with the recorded answers.
    """

    def __init__(self, host: Host, transcript: Transcript) -> None:
        self._host = host
        self._transcript = transcript
        self.unawaited: list[AwaitableCall[Any]] = []
        """Calls that the script has not awaited yet."""
        self.vars = Vars(_RecordedVariables(host.variables, transcript))
        """The variables of the request: ``ctx.vars["name"]``, ``get``, ``has``, ``set``,
        ``append``."""

    # --- waiting --------------------------------------------------------------------------------

    @awaitable_call
    async def fixed(self, text: str | bytes, following: Label | None = None) -> None:
        """Appends a text. If ``following`` is given, first drops the tokens after this label."""
        after = None
        if following is not None:
            after = _position("fixed(following=label)", following)

        def make(question: Question) -> Operation:
            length = len(self._transcript.tokens)
            if after is not None and after > length:
                raise _wrong(
                    f"fixed(following=label): the label is at {after} tokens, but the sequence was "
                    f"cut back to {length}; expected a label within it"
                )
            data = text.encode() if isinstance(text, str) else text
            tokens = self._host.vocabulary.tokenize(data)
            return Append(question, tokens, self._transcript, after)

        if not isinstance(text, str | bytes):
            raise _wrong(f"fixed(text) with {text!r}; expected text or bytes")
        await self._ask(make, "fixed", text=text, following=following)

    @overload
    def gen(
        self, /, *, logprobs: Literal[True], **options: Unpack[GenerationOptions]
    ) -> Awaitable[Generated]: ...

    @overload
    def gen(
        self, /, *, logprobs: Literal[False] = False, **options: Unpack[GenerationOptions]
    ) -> Awaitable[str]: ...

    @awaitable_call
    async def gen(
        self,
        *,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        json_schema: dict[str, object] | str | None = None,
        lark: str | None = None,
        yacc: str | None = None,
        substring: str | None = None,
        substring_end: str | None = None,
        allow: TokenSet | Iterable[int] | None = None,
        stop_at: str | Sequence[str] | None = None,
        max_tokens: int | None = None,
        bias: BiasValues = None,
        logprobs: bool = False,
    ) -> str | Generated:
        """Generates text with the model, and returns it. With ``logprobs``, the result also has the
        tokens of the text and their log-probabilities.

        At most one constraint may be given:

        - ``regex`` (Rust's syntax; matches the whole text)
        - ``choice`` (one of these texts)
        - ``json_schema``
        - ``lark`` (llguidance's dialect)
        - ``yacc`` (a grammar)
        - ``substring`` (a part of this text, followed by ``substring_end`` if that is given)
        - ``allow`` (only these tokens)

        Generation ends in one of these cases:

        - the constraint allows no more tokens
        - ``stop_at``, or a text of the list ``stop_at``, occurs, even within a token; the result
          includes this text
        - ``max_tokens`` tokens were generated
        - the model samples an end-of-sequence token, which is only allowed if the text is complete

        The request's ``max_tokens`` applies as well. ``bias`` is added to the logits of each token,
        as the bias of ``sample`` is.

        Raises ControllerError if an argument is not valid.
        """
        allowed = allow
        if allow is not None and not isinstance(allow, TokenSet):
            try:
                allowed = TokenSet(self._host.vocabulary.size, allow)
            except (TypeError, ValueError) as error:
                raise _wrong(f"gen(allow=…): {error}; expected ids of tokens") from None
        schema = json_schema
        if isinstance(json_schema, dict):
            schema = json.dumps(json_schema)
        stops = (stop_at,) if isinstance(stop_at, str) else tuple(stop_at or ())
        if any(not isinstance(stop, str) or not stop for stop in stops):
            raise _wrong(f"gen(stop_at={stop_at!r}); expected text that is not empty")
        if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
            raise _wrong(f"gen(max_tokens={max_tokens!r}); expected a number, at least 1")
        if not isinstance(logprobs, bool):
            raise _wrong(f"gen(logprobs={logprobs!r}); expected True or False")
        options = None if choice is None else _options(choice)
        given: dict[str, object] = {
            "regex": regex,
            "choice": options,
            "json_schema": schema,
            "lark": lark,
            "yacc": yacc,
            "substring": substring,
            "allow": allowed,
        }
        kinds = {name: value for name, value in given.items() if value is not None}
        if len(kinds) > 1:
            raise _wrong(f"gen({', '.join(kinds)}): only one of these is allowed at a time")

        added = bias_of(bias, self._host.vocabulary.size, "gen(bias=…)")
        rest: dict[str, object] = {
            "substring_end": substring_end,
            "stop_at": stops or None,
            "max_tokens": max_tokens,
            "logprobs": logprobs or None,
        }
        delegated = _delegated(kinds | rest)

        def make(question: Question) -> Operation:
            if delegated is not None:
                return Delegated(question, self._host, delegated, added)
            text = GeneratedText(stop_at=list(stops), max_tokens=max_tokens, logprobs=logprobs)
            return Generate(question, self._host, self._constraint(kinds), text, added)

        if added is not None:
            rest["bias"] = zlib.crc32(added.encoded())
        return text_of_answer(await self._ask(make, "gen", **kinds, **rest))

    @awaitable_call
    async def fork(self, count: int) -> int:
        """Forks into ``count`` sequences. Each of them continues the script after this call, which
        returns the sequence's index, 0 to ``count - 1``. Index 0 is the original sequence."""
        if not isinstance(count, int) or count < 1:
            raise _wrong(f"fork({count!r}); expected a number, at least 1")
        index = await self._ask(
            lambda question: Fork(question, count, self._host.seq), "fork", count=count
        )
        assert isinstance(index, int)
        return index

    @awaitable_call
    async def spawn(self, prompt: str | bytes | list[int]) -> int:
        """Begins another sequence with a fresh prompt, which is a text or a list of token ids. Both
        sequences continue the script after this call, which returns 1 in the new sequence and 0 in
        the original."""
        tokens = self.tokenize(prompt) if isinstance(prompt, str | bytes) else prompt
        if not isinstance(tokens, list) or not tokens:
            raise _wrong(
                f"spawn({prompt!r}); expected a text that is not empty, or a list of token ids"
            )
        index = await self._ask(
            lambda question: Fork(question, 2, self._host.seq), "spawn", prompt=tokens
        )
        assert isinstance(index, int)
        if index:
            await self._replace(Answer(Action.BEGIN, tokens=tokens), "begin")
        return index

    @awaitable_call
    async def save(self, name: str, *, pin_s: float = 300.0) -> None:
        """Saves the tokens of the sequence, including the prompt, as a context. Programs of the
        same tenant can open the context, in this request and in others.

        For ``pin_s`` seconds (at most 3600), the worker keeps the computed tokens in its KV cache
        if running requests leave room. Raises ControllerError if an argument is not valid.
        """
        number = isinstance(pin_s, int | float) and not isinstance(pin_s, bool)
        if not isinstance(name, str) or not number:
            raise _wrong(f"save({name!r}, pin_s={pin_s!r}); expected a name and a number")
        tokens = list(self._transcript.tokens)
        answer = Answer(Action.SAVE, tokens=tokens, name=name, pin_s=float(pin_s))
        await self._replace(answer, "save", name=name, pin_s=pin_s)

    @awaitable_call
    async def open(self, name: str) -> None:
        """Replaces all tokens of the sequence, including the prompt, by those of a context. Raises
        ControllerError if the tenant does not have a context of this name, or if another model has
        saved it. The sequence is then unchanged."""
        if not isinstance(name, str):
            raise _wrong(f"open({name!r}); expected the name of a context")
        await self._replace(Answer(Action.OPEN, name=name), "open", name=name)

    @awaitable_call
    async def score(
        self, candidates: Iterable[str | bytes | list[int]], *, per_token: bool = False
    ) -> list[Any]:
        """Returns the log-probability of each candidate as a continuation of the sequence, which
        does not change.

        A candidate is a text or a list of token ids. With ``per_token``, each element is a list of
        the log-probabilities of the candidate's tokens. The numbers are natural logarithms under
        the model's own distribution, before mask, bias and temperature. Raises ControllerError if
        there are more than 64 candidates, or if the candidates together have more than 4096 tokens.
        """
        vocabulary = self._host.vocabulary
        texts = texts_of(candidates, vocabulary.size, self.tokenize)
        scores = await self._ask(
            lambda question: Score(question, self._host, texts), "score", texts=texts
        )
        return of_texts(cast(Scores, scores), per_token)

    @awaitable_call
    async def distribution(self, top: int = 8) -> list[list[Any]]:
        """The ``top`` most likely next tokens, each as ``[token, logprob]``, the most likely first.
        The sequence does not change. The log-probabilities are those of the model's own
        distribution, before mask, bias and temperature."""
        query = checked_query(Query(top), self._host.vocabulary.size)
        found = await self._ask(
            lambda question: Look(question, self._host, query), "distribution", top=top
        )
        return cast("list[list[Any]]", found)

    @awaitable_call
    async def wait_var(self, name: str) -> str:
        """Suspends the sequence until the request has the variable ``name``, and returns the
        variable's text."""
        read = self._host.variables.await_write
        stored = await self._ask(
            lambda question: WaitFor(question, lambda: read(name)), "wait_var", name=name
        )
        assert isinstance(stored, Stored)
        return text_of(name, stored)

    @awaitable_call
    async def receive(self) -> str:
        """Suspends the sequence until the client sends an input, and returns the input's text.
        Inputs are received in the order in which the client sent them. Only one sequence receives
        each input."""
        receive = self._host.variables.receive
        text = await self._ask(lambda question: Receive(question, receive), "receive")
        assert isinstance(text, str)
        return text

    @awaitable_call
    async def call(self, tool: str, /, **arguments: Any) -> Any:
        """Calls a function of a tool worker, and returns its result.

        Arguments and results are JSON values. Raises ControllerError if the call fails.
        """
        return msgspec.json.decode(await self._call(tool, arguments))

    @awaitable_call
    async def stop(self) -> None:
        """Ends the sequence; does not return."""
        await self._ask(Stop, "stop")

    # --- reading --------------------------------------------------------------------------------

    @property
    def prompt(self) -> list[int]:
        """The tokens of the prompt."""
        return self._transcript.tokens[: self._transcript.prompt_length]

    @property
    def tokens(self) -> list[int]:
        """The tokens of the sequence, including the prompt."""
        return list(self._transcript.tokens)

    @property
    def arg(self) -> Any:
        """The request's ``controller_arg``: its value if it is JSON, its text if it is not JSON,
        and None if it is empty."""
        return parsed(self._host.arg)

    @property
    def seq(self) -> int:
        """The id of this sequence. Each forked sequence has a different id."""
        seq = _read(self._transcript, Question("seq"), lambda: self._host.seq)
        assert isinstance(seq, int)
        return seq

    @property
    def eos(self) -> int:
        """The first end-of-sequence token; -1 if the model does not have one."""
        return self._host.vocabulary.eos

    def tokenize(self, text: str | bytes) -> list[int]:
        """The tokens of a text, without special tokens."""
        return self._host.vocabulary.tokenize(text.encode() if isinstance(text, str) else text)

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are not UTF-8 are replaced."""
        return b"".join(map(self._host.vocabulary.token, tokens)).decode("utf-8", "replace")

    def token_set(self, test: Callable[[bytes], bool]) -> TokenSet:
        """The tokens whose bytes pass a test, for ``gen(allow=…)``."""
        return TokenSet.where(self._host.vocabulary, test)

    def special_token(self, name: str) -> int | None:
        """The id of a special token; None if the model does not have it. ``name`` as in
        ``Controller.special_token``."""
        return special_token(self._host, name)

    def label(self) -> Label:
        """The current position in the sequence."""
        return Label(len(self._transcript.tokens))

    def tokens_since(self, label: Label) -> list[int]:
        """The tokens after a label."""
        return self._transcript.tokens[_position("tokens_since(label)", label) :]

    def text_since(self, label: Label) -> str:
        """The text after a label; bytes that are not UTF-8 are replaced."""
        return self.text(self._transcript.tokens[_position("text_since(label)", label) :])

    def send(self, text: str) -> None:
        """Sends a text of at most 32,768 bytes to the client, in addition to the tokens."""
        if not isinstance(text, str):
            raise _wrong(f"send(text) with {text!r}; expected text")
        if not self._transcript.replaying:
            self._host.variables.send(text.encode("utf-8", "replace"))

    def log(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Prints to the sequence's log, which the client receives with the sequence's tokens."""
        if not self._transcript.replaying:
            self._host.log.write((sep.join(map(str, values)) + end).encode())

    # --- inside ---------------------------------------------------------------------------------

    async def _ask(
        self, make: Callable[[Question], Operation], call: str, **arguments: object
    ) -> object:
        """The answer to a question. A *question* is a call of the script on its context. During a
        replay, the recorded answer is returned. If no replay runs, ``make`` creates an operation,
        and its result is returned."""
        given = tuple((name, value) for name, value in arguments.items() if value is not None)
        question = Question(call, given)
        transcript = self._transcript
        if transcript.replaying:
            entry = transcript.replay(question)
            if entry is not None:
                return entry.answer
        try:
            operation = make(question)
            if not operation.finished:
                await _waiting(operation)
        except ControllerError as error:
            transcript.add(question, None, error)
            raise
        transcript.add(question, operation.answer)
        return operation.answer

    async def _replace(self, answer: Answer, call: str, **arguments: object) -> None:
        """Saves the tokens of the sequence, or replaces them."""
        result = await self._ask(
            lambda question: Replace(question, self._host, answer), call, **arguments
        )
        if isinstance(result, str):
            raise _wrong(result)
        if result:
            self._transcript.prompt_length = cast(int, result)

    async def _call(self, tool: str, arguments: dict[str, Any]) -> bytes:
        """Calls a tool; returns the JSON of its result."""
        encoded = encoded_arguments(tool, arguments)
        record = await self._ask(
            lambda question: CallTool(question, self._host, tool, encoded),
            "call",
            tool=tool,
            arguments=encoded,
        )
        assert isinstance(record, bytes)
        return value_of(record)

    def _constraint(self, kinds: dict[str, object]) -> Constraint | None:
        match kinds:
            case {"regex": str(pattern)}:
                grammar = script_constraints.regex(pattern)
            case {"choice": tuple(options)}:
                grammar = script_constraints.choice(options)
            case {"json_schema": str(schema)}:
                try:
                    grammar = script_constraints.json_schema(schema)
                except (ValueError, RefusedGrammar) as error:
                    raise _wrong(f"gen(json_schema=…): {error}") from None
            case {"lark": str(text)}:
                try:
                    grammar = script_constraints.lark(text)
                except RefusedGrammar as error:
                    raise _wrong(f"gen(lark=…): {error}") from None
            case {"allow": TokenSet() as tokens}:
                if not tokens or tokens.size != self._host.vocabulary.size:
                    size = self._host.vocabulary.size
                    raise _wrong(f"gen(allow={tokens!r}); expected some of {size} tokens")
                return Allowed(tokens)
            case {}:
                if not kinds:
                    return None
                raise _wrong(
                    f"gen({', '.join(f'{k}={v!r}' for k, v in kinds.items())}); expected text"
                )
        try:
            return Grammar(self._host.vocabulary, grammar)
        except ControllerError as error:
            name, value = next(iter(kinds.items()))
            raise _wrong(f"gen({name}={value!r}): {error.message}") from error.__cause__


class _RecordedVariables:
    """The variables of a request; each access is recorded in the transcript."""

    def __init__(self, variables: Variables, transcript: Transcript) -> None:
        self._variables = variables
        self._transcript = transcript

    def await_write(self, name: str, version: int = 1) -> Stored | None:
        """Reads a variable. If the variable does not have the version yet, returns None, and the
        write of this version will wake the sequence. The answer is not recorded here, because
        ``Context.wait_var`` records it."""
        return self._variables.await_write(name, version)

    def receive(self) -> bytes | None:
        """Receives an input. The text is not recorded here, because ``Context.receive`` records
        it."""
        return self._variables.receive()

    def send(self, text: bytes) -> None:
        """Sends a text to the client."""
        self._variables.send(text)

    def get(self, name: str) -> Stored | None:
        """Reads a variable."""
        question = Question("vars.get", (("name", name),))
        stored = _read(self._transcript, question, lambda: self._variables.get(name))
        assert stored is None or isinstance(stored, Stored)
        return stored

    def set(self, name: str, value: bytes, when_version_is: int | None = None) -> Written:
        """Writes a variable."""
        return self._write("set", name, value, when_version_is)

    def append(self, name: str, value: bytes, when_version_is: int | None = None) -> Written:
        """Appends to a variable."""
        return self._write("append", name, value, when_version_is)

    def _write(self, op: str, name: str, value: bytes, when: int | None) -> Written:
        write = self._variables.set if op == "set" else self._variables.append
        question = Question(f"vars.{op}", (("name", name), ("value", value), ("when", when)))
        written = _read(self._transcript, question, lambda: write(name, value, when))
        assert isinstance(written, Written)
        return written


@types.coroutine
def _waiting(operation: Operation) -> Generator[Operation, None, None]:
    """Yields an operation to the controller, which resumes the script once the operation is
    finished."""
    yield operation


def _read(transcript: Transcript, question: Question, live: Callable[[], object]) -> object:
    """The answer to a question that is answered without an operation. During a replay, this is the
    recorded answer. If no replay runs, this is the result of ``live``."""
    if transcript.replaying:
        entry = transcript.replay(question)
        if entry is None:
            raise transcript.unlike(str(question))
        return entry.answer
    try:
        answer = live()
    except ControllerError as error:
        transcript.add(question, None, error)
        raise
    transcript.add(question, answer)
    return answer


def _position(what: str, label: object) -> int:
    if not isinstance(label, Label):
        raise _wrong(f"{what} with {label!r}; expected a label from ctx.label()")
    return label.position


def _delegated(options: dict[str, object]) -> GeneratedText | None:
    """Returns the text that the worker must generate, if ``gen`` is called with a constraint that
    only the worker implements (yacc or substring). Returns None for any other call of ``gen``."""
    given = {name: value for name, value in options.items() if value is not None}
    if not given.keys() & {"yacc", "substring", "substring_end"}:
        return None
    # Frame 0 is this function, frame 1 is gen, and frame 2 is the script's function that awaits
    # gen.
    code = (frame := sys._getframe(2)).f_code
    return text_of_options(given, place(code.co_filename, frame.f_lineno, code.co_name))


def _options(choice: object) -> tuple[str, ...]:
    right = "a list of at least one text"
    if isinstance(choice, str | bytes) or not isinstance(choice, Iterable):
        raise _wrong(f"gen(choice={choice!r}); expected {right}, as in [{str(choice)!r}]")
    options = tuple(choice)
    if not options or not all(isinstance(option, str) for option in options):
        raise _wrong(f"gen(choice={list(options)!r}); expected {right}")
    return options


def _wrong(message: str) -> ControllerError:
    return ControllerError(Code.CONTROLLER_FAILED, message)
