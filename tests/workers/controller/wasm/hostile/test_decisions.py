"""Hostile guests with decisions that are not allowed: masks, splices, tokens and answers."""

from __future__ import annotations

import pytest
from tokenbus.clients import ControllerError

from .....worlds.hostile_guests import System
from ..aici_guests import puppet
from .guests import DROP, FREE, LIST, MASK, MASK_AT, N, guest, set_word

pytestmark = pytest.mark.process


def test_a_mask_at_the_very_end_of_memory_is_a_mask(system: System) -> None:
    vocabulary = system.client.model_info().vocab_size
    at = 65_536 - 4 * -(-vocabulary // 32)
    name = system.upload(
        guest(mid=set_word(MASK_AT, at) + f"(i32.store (i32.const {at}) (i32.const 0x20))")
    )
    [sequence] = system.undisturbed(lambda: system.run(name))
    assert sequence.tokens == [5] * 5


def test_bits_beyond_the_vocabulary_mean_nothing(system: System) -> None:
    # All bits of the mask are set, even those beyond the vocabulary in its last word.
    free = system.client.generate("x = 1", max_tokens=5, ignore_eos=True).tokens()
    name = system.upload(guest(mid=set_word(MASK_AT, MASK)))
    [sequence] = system.undisturbed(lambda: system.run(name))
    assert sequence.tokens == free


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_empty_mask_is_reported(system: System, temperature: float) -> None:
    error = system.controller_error(guest(mid=set_word(MASK_AT, FREE)), temperature=temperature)
    assert error == (
        "the controller's mask and bias forbid all possible tokens; allow at least one, or stop"
    )


def splice(drop: int, *tokens: int) -> str:
    """Instructions that return a splice."""
    stores = "".join(set_word(FREE + 4 * i, token) for i, token in enumerate(tokens))
    words = set_word(N, len(tokens)) + set_word(LIST, FREE) + set_word(DROP, drop)
    return f"{stores} {words} (return (i32.const 4))"


@pytest.mark.parametrize("drop", [5, 2**32 - 1])
def test_a_splice_before_the_beginning_is_reported(system: System, drop: int) -> None:
    # The splice is in the third round, when the sequence has 2 tokens.
    body = f"(if (i32.eq (global.get $round) (i32.const 3)) (then {splice(drop, 7)}))"
    assert system.controller_error(guest(mid=body)) == (
        f"the splice drops {drop} tokens; the sequence has 2 beyond its prompt"
    )


def test_a_splice_that_does_nothing_is_reported(system: System) -> None:
    assert system.controller_error(guest(mid=splice(0))) == (
        "the splice neither drops nor appends tokens; a splice must drop or append some"
    )


@pytest.mark.parametrize("phase", ["pre", "mid"])
@pytest.mark.parametrize("token", [1_000_000, 2**32 - 1])
def test_a_token_outside_the_vocabulary_is_reported(system: System, phase: str, token: int) -> None:
    last = system.client.model_info().vocab_size - 1
    assert system.controller_error(guest(**{phase: splice(0, 65, token)})) == (
        f"the controller appended token {token}; token ids of this model are 0 to {last}"
    )


@pytest.mark.parametrize(
    ("phase", "known"),
    [
        ("pre", "0 (stop), 1 (continue), 2 (suspend), 3 (fork), 4 (append)"),
        ("mid", "0 (stop), 1 (sample), 4 (splice), 10 (look)"),
        ("post", "0 (stop), 1 (continue)"),
    ],
)
def test_an_answer_that_does_not_exist_is_reported(system: System, phase: str, known: str) -> None:
    error = system.controller_error(guest(**{phase: "(return (i32.const 7))"}))
    assert error == f"{phase}_process returned 7; it must return one of {known}"


@pytest.mark.parametrize(
    "calls",
    [
        {"pre": splice(0, 65)},
        {"mid": splice(0, 65)},
        {
            "init": "(global.set $kept (i32.const 0))",
            "mid": f"""(if (global.get $kept) (then {splice(2, 65, 66)}))
              (global.set $kept (i32.const 1)) {splice(0, 65, 66)}""",
        },
    ],
    ids=["pre_process", "mid_process", "back and forth"],
)
def test_a_controller_that_never_samples_is_stopped(system: System, calls: dict[str, str]) -> None:
    assert system.controller_error(guest(**calls), max_tokens=2000) == (
        "the controller appended tokens in 256 rounds without sampling; it must sample, suspend or "
        "stop earlier"
    )


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (1_000_000, "the controller appended 1000000 tokens at once; at most 65536 are allowed"),
        (
            40_000,
            "the controller appended 80000 tokens without sampling; at most 65536 are allowed",
        ),
    ],
)
def test_appending_more_and_more_is_stopped(system: System, count: int, says: str) -> None:
    inbox = set_word(1028, 131_072) + set_word(1032, 4_000_000)
    wasm = guest(
        pages=80,
        grow=f"{inbox} (return (i32.const 1))",
        pre=set_word(N, count) + set_word(LIST, FREE) + "(return (i32.const 4))",
    )
    assert system.controller_error(wasm, max_tokens=2000) == says


@pytest.mark.parametrize("phase", ["pre", "mid", "post"])
def test_garbage_for_json_is_shown(system: System, phase: str) -> None:
    name = system.upload(puppet())
    splice = '{"Splice":{"backtrack":-1,"ff_tokens":[1e99]}}'
    garbage = ['{"', "nonsense", "[[[[", "", "\x00", splice]

    def every() -> list[str]:
        errors = []
        for one in garbage:
            with pytest.raises(ControllerError) as caught:
                system.run(name, controller_arg=f"{phase} = {one}")
            errors.append(caught.value.message)
        return errors

    for one, error in zip(garbage, system.undisturbed(every), strict=True):
        shown = "\\x00" if one == "\x00" else one or "nothing"
        assert error.startswith(f"{phase}_process returned {shown}")
        assert "expected" in error
