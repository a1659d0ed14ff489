"""Decides *along a draft*: computes the mask and the bias after each token of a draft in advance. A
draft is a list of tokens that the GPU worker expects next.

A built-in constraint computes its masks along a draft in one call. Any other controller must allow
drafts with ``takes_drafts``. The worker copies such a controller. The copy runs the rounds that the
controller would run if the draft's tokens were sampled. The copy stops before a decision that does
more than sample. It also stops if it uses a variable, an input or a tool, sends a text to the
client, or writes to the log. The copy is then dropped.

When tokens of the draft have been sampled, the controller itself runs the round of each token. So
the controller receives the same calls as without drafts. It receives them after all of these tokens
were sampled.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NoReturn

from ...protocol.errors import Code, ControllerError, TokenbusError
from .biases import Bias
from .host import Host
from .interface import Action, Answer, Controller, RunsAhead, TakesDrafts
from .logs import Log


@dataclass(slots=True)
class Place:
    """The buffers for a controller's decision (mask and bias) after one token of a draft."""

    mask: memoryview
    row: int | None = None
    """The row of the shared file (``masks.py``) that ``mask`` refers to. None if masks are sent as
    attachments."""
    bias_view: memoryview | None = None
    """The buffer for a bias in the row ``row``. None if ``row`` is None, or if the shared file has
    no room for biases."""
    biased: bool = False
    """Whether the last stored decision had a bias."""
    bias: bytes = b""
    """The bias of the last decision, if it is sent as an attachment."""

    def give_bias(self, bias: Bias | None) -> bool:
        """Stores the bias of a decision; returns False if the shared file has no room for
        biases."""
        self.biased, self.bias = bias is not None, b""
        if bias is None:
            return True
        if self.row is None:
            self.bias = bias.encoded()
        elif self.bias_view is None:
            return False
        else:
            bias.write(self.bias_view)
        return True

    def take_bias(self) -> bytes | None:
        """Removes and returns the bias of the last decision. Returns None if the decision had no
        bias, and empty bytes if the bias is in a row of the shared file."""
        bias, self.bias = self.bias, b""
        return bias if self.biased else None


def takes_drafts(controller: Controller) -> bool:
    """Whether a controller, or a copy of it, can decide along drafts."""
    return isinstance(controller, TakesDrafts) or runs_ahead(controller)


def runs_ahead(controller: Controller) -> bool:
    """Whether a copy of a controller can decide along drafts."""
    return isinstance(controller, RunsAhead) and controller.takes_drafts


def decide_along(
    controller: Controller, host: Host, draft: Sequence[int], places: Sequence[Place]
) -> int:
    """Writes the decision after each token of a draft into ``places``; returns the number of
    written decisions. Stops at the first token after which the controller would do more than
    sample. Also stops if the shared file has no room for a bias."""
    if isinstance(controller, TakesDrafts):
        return controller.masks_along(draft, [place.mask for place in places])
    written = 0
    try:
        with closing(_answers(controller, host, draft, places)) as answers:
            for place, answer in zip(places, answers, strict=False):
                if not answer.masked:
                    allow_all(place.mask)
                if not place.give_bias(answer.bias):
                    break
                written += 1
    except TokenbusError:
        # The copy used a variable, or it failed. If it failed, the controller fails in the same way
        # when these tokens are sampled.
        pass
    return written


def allow_all(mask: memoryview) -> None:
    """Writes the mask that allows every token."""
    mask[:] = b"\xff" * len(mask)


def _answers(
    controller: Controller, host: Host, draft: Sequence[int], places: Sequence[Place]
) -> Generator[Answer]:
    """Runs a copy of the controller along a draft. Yields the answer of the copy's mid_process
    after each token, as long as the copy only samples. The bias of an answer is valid until the
    next answer."""
    log = Log(1)
    copy = controller.fork(
        replace(host, variables=_NoVariables(), tools=None, log=log, distributions=())
    )
    with closing(copy):
        for token, place in zip(draft, places, strict=False):
            if token in host.vocabulary.eos_ids:
                return
            if copy.post_process([token], 0).action is Action.STOP:
                return
            if not goes_on(copy.pre_process()):
                return
            answer = copy.mid_process((host.seq,), place.mask)
            asks = answer.query is not None or answer.override is not None or answer.logprobs
            if answer.action is not Action.CONTINUE or asks or log.take():
                return
            yield answer


def goes_on(answer: Answer) -> bool:
    """Whether an answer of pre_process only continues with mid_process."""
    alone = answer.action is Action.FORK and answer.count == 1
    return alone or answer.action is Action.CONTINUE


class _NoVariables:
    """Replaces the variables in a copy that runs along a draft. Every method raises an error, which
    stops the copy. If a copy could use variables, other sequences might see effects of tokens that
    are never sampled."""

    def get(self, name: str) -> NoReturn:
        """Raises an error: a copy must not use variables."""
        raise ControllerError(Code.CONTROLLER_FAILED, f"it reads {name!r} along a draft")

    def await_write(self, name: str, version: int = 1) -> NoReturn:
        """Raises an error: a copy must not use variables."""
        self.get(name)

    def set(self, name: str, value: bytes, when_version_is: int | None = None) -> NoReturn:
        """Raises an error: a copy must not use variables."""
        raise ControllerError(Code.CONTROLLER_FAILED, f"it writes {name!r} along a draft")

    append = set

    def receive(self) -> NoReturn:
        """Raises an error: a copy must not receive inputs."""
        raise ControllerError(Code.CONTROLLER_FAILED, "it receives an input along a draft")

    def send(self, text: bytes) -> NoReturn:
        """Raises an error: a copy must not send texts."""
        raise ControllerError(Code.CONTROLLER_FAILED, "it sends a text along a draft")
