"""A stream reports how its tokens were computed, even after it has moved to another worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from tokenbus.protocol.header import Flag
from tokenbus.protocol.messages import Span, Token
from tokenbus.workers.gpu.model.cpu_native.library import instruction_set, library
from tokenbus.workers.gpu.model.loader import LoadedModel, load_model
from tokenbus.workers.gpu.model.weights import weights_version

from ...worlds.gpu_worker_loop import Loop
from .moved import finish, give, token_messages, transcript

native = pytest.mark.skipif(
    library() is None, reason="no native code was compiled for this machine"
)
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 6, "n": 2, "ignore_eos": True, "seed": 3}


FORMS = pytest.mark.parametrize("flags", [0, Flag.COLUMNS])


def finished_loop(
    folder: Path,
    loaded: LoadedModel,
    flags: int = 0,
    exact: Literal["auto", "off"] = "auto",
    sent: list[list[Token]] | None = None,
) -> list[list[Token]]:
    """The messages of a worker that runs the request to its end. ``sent``: the messages of an
    earlier worker."""
    loop = Loop(folder, loaded, exact=exact)
    if sent is None:
        give(loop, b"GENERATE", BODY, flags)
    else:
        give(loop, b"GENERATE", BODY, flags | Flag.MOVED, transcript(sent))
    finish(loop)
    return token_messages(loop)


def spans(messages: list[list[Token]]) -> list[tuple[int, int, Span]]:
    """The sequence, the position and the content of each span."""
    return [(e.seq, e.pos, e.span) for m in messages for e in m if e.span is not None]


def ends(messages: list[list[Token]]) -> list[bool | None]:
    return [e.exact for m in messages for e in m if e.finish_reason is not None]


@native
@FORMS
def test_each_sequence_begins_with_its_span(
    tmp_path: Path, embedded: LoadedModel, flags: int
) -> None:
    messages = finished_loop(tmp_path, embedded, flags)
    span = Span(weights=embedded.weights, exact=instruction_set())
    assert spans(messages) == [(0, 0, span), (1, 0, span)]
    assert ends(messages) == [True, True]


@native
@FORMS
@pytest.mark.parametrize("cut", [1, 3])
def test_a_moved_stream_is_exact_only_if_each_worker_was(
    tmp_path: Path, embedded: LoadedModel, flags: int, cut: int
) -> None:
    begun = finished_loop(tmp_path, embedded, flags)[:cut]
    rest = finished_loop(tmp_path, embedded, flags, sent=begun)
    assert ends(rest) == [True, True]
    span = Span(weights=embedded.weights, exact=instruction_set())
    assert spans(rest) == [(0, cut, span), (1, cut, span)]
    rest = finished_loop(tmp_path, embedded, flags, "off", sent=begun)
    assert ends(rest) == [False, False]
    span = Span(weights=embedded.weights)
    assert spans(rest) == [(0, cut, span), (1, cut, span)]
    begun = finished_loop(tmp_path, embedded, flags, "off")[:cut]
    assert ends(finished_loop(tmp_path, embedded, flags, sent=begun)) == [False, False]


@native
def test_a_worker_of_an_earlier_release_is_not_exact(tmp_path: Path, embedded: LoadedModel) -> None:
    begun = finished_loop(tmp_path, embedded)[:2]
    for message in begun:
        for entry in message:
            entry.span = None
    assert ends(finished_loop(tmp_path, embedded, sent=begun)) == [False, False]


def test_the_version_of_the_weights_is_that_of_all_their_bytes() -> None:
    model = load_model("embedded")
    again = load_model("embedded")
    assert model.weights == again.weights
    weight = list(again.model.parameters())[-1]
    with torch.no_grad():
        weight.view(-1)[-1] += 1
    assert weights_version(again.model) != model.weights
