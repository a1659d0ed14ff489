"""A broker on one machine, its GPU and controller workers on another, and a client on each. The
link between the machines has 100 ms of delay, loses one packet in a hundred, and is cut for a while
under load."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from ..worlds.two_machines import System
from .two_machines import CannotMakeError, Link, Machine

pytestmark = pytest.mark.process

CUT_S = 20.0
DELAY_S, LOSS = 0.1, 0.01
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_k": 20, "seed": 7, "ignore_eos": True}
"""Options of sampled streams. Only 20 tokens can be sampled at each position, so that the last bits
of logits, which depend on the shape of the batch, rarely decide between two tokens."""
STEERED = {"text": False, "retry_s": 0}
"""Options of streams with controllers. A step of such a stream takes four times the link's delay,
and more if the controller uses variables."""
FREE_STREAMS: dict[str, dict[str, Any]] = {
    "def plain(": {"max_tokens": 400, "ignore_eos": True, "retry_s": 0},
    "def drawn(": {**DRAWN, "max_tokens": 400, "retry_s": 0},
    "def several(": {**DRAWN, "n": 3, "max_tokens": 250, "retry_s": 0},
}
CONSTRAINED: dict[str, dict[str, Any]] = {
    "import regex": {
        **DRAWN,
        **STEERED,
        "ignore_eos": False,
        "controller": "regex",
        "controller_arg": "[a-z ]{60}",
        "max_tokens": 100,
    },
}
CONTROLLED: dict[str, dict[str, Any]] = {
    "counts": {**DRAWN, **STEERED, "controller": "counts", "max_tokens": 16},
    "forks": {**DRAWN, **STEERED, "controller": "forks", "max_tokens": 24},
    **CONSTRAINED,
}
NEW: dict[str, dict[str, Any]] = {"class New": {**DRAWN, "max_tokens": 50}}
"""The streams that begin while the link is cut."""


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with ExitStack() as stack:
        try:
            near, far = Machine("near", "10.77.0.1"), Machine("far", "10.77.0.2")
        except CannotMakeError as error:
            pytest.skip(f"two machines need network namespaces and TUN devices: {error}")
        stack.callback(far.close)
        stack.callback(near.close)
        link = stack.enter_context(Link(near, far))
        folder = Path(tempfile.mkdtemp(prefix="tb-"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        system = System(near, far, link, folder)
        stack.callback(system.close)
        system.start()
        yield system


@pytest.fixture(scope="module")
def undisturbed(system: System) -> dict[str, Any]:
    """The sequences of each stream, from a run in which the link is not disturbed."""
    streams = CONTROLLED | FREE_STREAMS | NEW
    system.client.do("submit", streams=streams)
    outcomes = system.client.do("end", streams=list(streams))
    assert all("sequences" in outcome for outcome in outcomes.values()), outcomes
    return {name: one["sequences"] for name, one in outcomes.items()}


def check(outcomes: dict[str, Any], undisturbed: dict[str, Any], logs: str) -> None:
    """Checks that each stream has ended with the right sequences. Only streams that began while the
    link was cut may have been sent again."""
    for name, outcome in outcomes.items():
        assert "error" not in outcome, f"{name}: {outcome['error']}\n{logs}"
        assert outcome["sequences"] == undisturbed[name], name
        if name not in NEW:
            assert "retrying" not in outcome["notices"], f"{name} was sent again\n{logs}"


def test_nothing_is_lost_where_the_link_between_two_machines_is_cut(
    system: System, undisturbed: dict[str, Any]
) -> None:
    link, near, far = system.link, system.client, system.far_client
    link.delay_s, link.loss = DELAY_S, LOSS
    for of_near, of_far in ((CONTROLLED, CONSTRAINED), (FREE_STREAMS, FREE_STREAMS)):
        near.ask("begin", streams=of_near)
        far.ask("begin", streams=of_far)
        near.answer()
        far.answer()
    link.cut = True
    over = time.monotonic() + CUT_S
    near.do("submit", streams=NEW)
    far.do("submit", streams=NEW)
    near.ask("end", streams=[*CONTROLLED, *FREE_STREAMS, *NEW])
    far.ask("end", streams=[*CONSTRAINED, *FREE_STREAMS, *NEW])
    time.sleep(max(0.0, over - time.monotonic()))
    assert system.link.lost
    link.cut = False
    check(near.answer(), undisturbed, system.logs)
    check(far.answer(), undisturbed, system.logs)
