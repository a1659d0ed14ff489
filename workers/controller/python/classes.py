"""A controller as a Python class with the four calls init_prompt, pre_process, mid_process and
post_process.

class Upper(Controller):
    def mid_process(self, fork_group):
        return sample(self.capitals)
"""

from __future__ import annotations

import copy
import difflib
import inspect
from collections.abc import Sequence
from typing import Self

from ....protocol.errors import Code, ControllerError, RequestError
from ....protocol.sampling import Distribution, Query
from .. import interface
from ..host import Host
from ..interface import Answer
from ..queries import checked_query
from .arguments import parsed, special_token
from .author_calls import AuthorCalls
from .decisions import Decision, answer_of, go_on, sample, stop
from .text_variables import Vars


class Controller:
    """The base class of authors' controllers. Each sequence has a separate object. A forked
    sequence gets a copy of its parent's object.

    ``self.host`` is already set in ``__init__``. The default methods sample without a mask until
    the model ends the sequence.
    """

    host: Host
    """The vocabulary (``token``, ``tokenize``, ``size``, ``eos``), variables, limits, and the ids
    of the request and the sequence."""
    query: Query | None = None
    """A query about the distribution of each sampled token. post_process can read the answers from
    ``distributions``. Set the query in the class, in ``__init__`` or in any call.
    ``sample(query=...)`` applies to one token only."""

    takes_drafts: bool = False
    """Whether a clone of the object may run rounds in advance. A *draft* is a list of tokens that
    the model is expected to sample next. The clone runs a round for each token of a draft, and one
    step of the model can then verify the draft. Set the flag in a class or in ``__init__``. Drafts
    save time if a clone and a round are much cheaper than a step. The decisions must depend only on
    the prompt, the argument and the tokens. The clone is dropped before a round that uses a
    variable or the log."""

    def init_prompt(self, prompt: list[int]) -> None:
        """Called once, before all other calls, with the tokens of the prompt."""

    def pre_process(self) -> Decision | None:
        """Called before the model's next token; returns stop, suspend, fork, append or continue."""
        return go_on()

    def mid_process(self, fork_group: list[int]) -> Decision:
        """Called while the model computes: returns the mask for sampling, a splice, or stop.

        ``fork_group``: the ids of the sequences that this round's pre_process forked into,
        including this one. Without a fork, it has only the id of this sequence.
        """
        return sample()

    def post_process(self, tokens: list[int], backtrack: int) -> Decision | None:
        """Called after ``backtrack`` tokens were dropped and ``tokens`` appended.

        ``tokens`` includes a sampled end-of-sequence token. This default method stops after such a
        token, as AICI's controllers do.
        """
        return stop() if self.host.vocabulary.eos in tokens else go_on()

    def clone(self) -> Self:
        """Returns a copy for a forked sequence: a deep copy of all attributes, except that
        ``self.host`` is shared.

        Override this method if an attribute cannot be copied, or does not need a copy. The caller
        then gives the copy its own ``host``.
        """
        host = self.host
        shared = (host, host.vocabulary, host.variables, host.log, host.limits)
        return copy.deepcopy(self, {id(part): part for part in shared})

    @property
    def arg(self) -> object:
        """The request's ``controller_arg``: its value if it is JSON, its text if it is not JSON,
        and None if it is empty."""
        return parsed(self.host.arg)

    @property
    def seq(self) -> int:
        """The id of this sequence, as in ``fork_group``."""
        return self.host.seq

    @property
    def distributions(self) -> Sequence[Distribution]:
        """The answers to the query, one for each token that the last post_process received. Empty
        if the tokens were appended, or if no query was set."""
        return self.host.distributions

    @property
    def vars(self) -> Vars:
        """The variables of the request, as text."""
        return Vars(self.host.variables)

    def special_token(self, name: str) -> int | None:
        """The id of a special token; None if the model does not have it.

        ``name``: unk, pad, sep, bos, eos, cls, mask, turn_start or turn_end. The last two begin and
        end a turn of the assistant in the model's chat template.
        """
        return special_token(self.host, name)

    def log(self, *values: object, sep: str = " ", end: str = "\n") -> None:
        """Prints to the sequence's log, which the client receives with the sequence's tokens."""
        self.host.log.write((sep.join(map(str, values)) + end).encode())

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens; bytes that are not UTF-8 are replaced."""
        return b"".join(map(self.host.vocabulary.token, tokens)).decode("utf-8", "replace")


CALLS = {"init_prompt": 1, "pre_process": 0, "mid_process": 1, "post_process": 2}
"""The four calls, and the number of arguments of each after ``self``."""
ALIKE = 0.87
"""Minimum similarity at which a method's name counts as a misspelt call. ``midProcess`` counts as a
misspelt ``mid_process``; ``my_process`` does not."""


class PythonProgram:
    """A ``Program`` that makes objects of a class. Raises RequestError if the class is not
    valid."""

    def __init__(self, kind: type[Controller], name: str | None = None) -> None:
        self.name = name or f"{kind.__module__}:{kind.__qualname__}"
        if not (isinstance(kind, type) and issubclass(kind, Controller)):
            raise RequestError(
                Code.UNKNOWN_CONTROLLER,
                f"{self.name} is {kind!r}; it must be a subclass of Controller",
            )
        try:
            inspect.signature(kind).bind()
        except TypeError as error:
            raise RequestError(
                Code.UNKNOWN_CONTROLLER,
                f"{self.name} has an __init__ that requires arguments: {error}; it must take none "
                "(the request's argument is self.arg)",
            ) from None
        self._check_calls(kind)
        self._kind = kind

    def start(self, host: Host) -> interface.Controller:
        """Creates an object of the class."""
        calls = AuthorCalls(self.name, host)
        with calls.during("__init__"):
            controller = self._kind.__new__(self._kind)
            controller.host = host
            controller.__init__()  # type: ignore[misc]
        return ClassController(self.name, controller, calls)

    def _check_calls(self, kind: type[Controller]) -> None:
        """Raises RequestError if the class has a misspelt call, or a call with the wrong
        parameters."""
        own = {
            name: value
            for base in reversed(kind.__mro__)
            if not issubclass(Controller, base)
            for name, value in vars(base).items()
            if inspect.isfunction(value)
        }
        for name in own.keys() - vars(Controller).keys():
            missing = [c for c in CALLS if getattr(kind, c) is getattr(Controller, c)]
            alike = difflib.get_close_matches(name.lower(), missing, 1, ALIKE)
            if alike and not name.startswith("_"):
                raise RequestError(
                    Code.UNKNOWN_CONTROLLER,
                    f"{self.name} has a method {name}, which is never called, but does not have "
                    f"{alike[0]}; expected {alike[0]}, or a name that is less similar to it",
                )
        for call, count in CALLS.items():
            if call not in own:
                continue
            signature = inspect.signature(own[call])
            try:
                signature.bind(*(None,) * (1 + count))
            except TypeError as error:
                right = inspect.signature(getattr(Controller, call))
                names = ", ".join(right.parameters)
                raise RequestError(
                    Code.UNKNOWN_CONTROLLER,
                    f"{self.name}.{call}{signature} cannot be called: {error}; expected "
                    f"{call}({names})",
                ) from None


class ClassController:
    """The controller of one sequence: adapts an author's object to ``interface.Controller``."""

    def __init__(self, name: str, controller: Controller, calls: AuthorCalls) -> None:
        self._name = name
        self._controller = controller
        self._calls = calls

    @property
    def takes_drafts(self) -> bool:
        """The attribute ``takes_drafts`` of the author's object."""
        return self._controller.takes_drafts

    def init_prompt(self, prompt: Sequence[int]) -> None:
        """Calls the author's init_prompt."""
        with self._calls.during("init_prompt"):
            returned: object = self._controller.init_prompt(list(prompt))  # type: ignore[func-returns-value]
            answer_of("init_prompt", returned, self._controller.host)

    def pre_process(self) -> Answer:
        """Calls the author's pre_process."""
        with self._calls.during("pre_process"):
            returned = self._controller.pre_process()
            return answer_of("pre_process", returned, self._controller.host)

    def mid_process(self, fork_group: Sequence[int], mask: memoryview) -> Answer:
        """Calls the author's mid_process, and copies the returned mask into ``mask``."""
        with self._calls.during("mid_process"):
            controller = self._controller
            returned = controller.mid_process(list(fork_group))
            answer = answer_of("mid_process", returned, controller.host, mask)
            if controller.query is None or answer.query is not None:
                return answer
            if answer.action is not interface.Action.CONTINUE:
                return answer
            query = checked_query(controller.query, controller.host.vocabulary.size)
            return answer._replace(query=query)

    def post_process(self, tokens: Sequence[int], backtrack: int) -> Answer:
        """Calls the author's post_process."""
        with self._calls.during("post_process"):
            returned = self._controller.post_process(list(tokens), backtrack)
            return answer_of("post_process", returned, self._controller.host)

    def fork(self, host: Host) -> interface.Controller:
        """A controller with a clone of the author's object."""
        calls = AuthorCalls(self._name, host)
        with calls.during("clone"):
            copied = self._cloned()
            copied.host = host
        return ClassController(self._name, copied, calls)

    def close(self) -> None:
        """Does nothing: the object holds no resources."""

    def _cloned(self) -> Controller:
        original = self._controller
        try:
            copied = original.clone()
        except TypeError as error:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the controller cannot be copied for a fork: {error}; override clone() to copy it",
            ) from error
        if copied is original or type(copied) is not type(original):
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"clone returned {'self' if copied is original else repr(copied)}; "
                f"expected another object of {type(original).__name__}",
            )
        return copied
