"""Controllers in a whole system: client, broker, GPU worker, controller workers, variables."""

from __future__ import annotations

import contextlib
import math
import random
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tokenbus.clients import (
    Client,
    ControllerError,
    RequestError,
    RequestTimeoutError,
    UnavailableError,
)
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from ...processes import Bus, until
from ...worlds.controllers import GUEST, PROMPT, SCRIPTED, Options, System, _serving
from ..gpu import shapes
from .tokens.small_tokenizers import byte_level
from .wasm.guests import compile_guest
from .wasm.hostile.neighbour import Neighbour

pytestmark = pytest.mark.process

IDS = [40, 41, 42, 43, 44]
SEEDED: Options = {"temperature": 1.0, "seed": 11}
EOS = 0


@pytest.fixture(scope="module")
def system(processes: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    second = tmp_path_factory.mktemp("model") / "llama"
    shapes.make("llama").save_pretrained(second)
    PreTrainedTokenizerFast(tokenizer_object=byte_level()).save_pretrained(second)
    with Bus(heartbeat_s=0.2, controller_idle_wakes=20) as bus:
        bus.start_worker()
        bus.start_worker(model=second)
        bus.start_other("state")
        bus.start_other("controller", controller_mid_ms=2000)
        bus.others.append(
            _serving(bus, SCRIPTED, "scripted:Slow", "scripted:Gated", "scripted:Unwilling")
        )
        wasm = compile_guest(GUEST)
        bus.wait_for_models("embedded")
        bus.wait_for_models(str(second))
        bus.wait_for_roles("controller", "controller", "state")
        with bus.client() as client:
            client.upload_controller(wasm, tag="guest")
            yield System(bus, client, str(second))


@cache
def tokenizer() -> Tokenizer:
    """The tokenizer of the embedded model."""
    return Tokenizer.from_file(str(files("tokenbus.workers.gpu.embedded") / "model/tokenizer.json"))


def decoded(tokens: list[int]) -> str:
    return tokenizer().decode(tokens)


STEERED: dict[str, Options] = {
    "a module without masks": {"controller": "guest"},
    "a module with masks": {"controller": "guest", "controller_arg": "mask"},
    "Python": {"controller": SCRIPTED},
}
"""Controllers that change no token."""
steered = pytest.mark.parametrize("how", STEERED.values(), ids=STEERED)


# --- controllers that change no token -------------------------------------------------------------


def test_biases_reach_the_model_and_inspect_says_what_they_did(system: System) -> None:
    """The first bias is an attachment of a message. The next ones are in the shared file."""
    todo = [
        ["sample", None, {"40": 100.0, "41": 50.0}],
        ["sample", None, {"42": 100.0}],
        ["sample", [42, 45], 50.0],
        ["sample", None, {"50": 2**20}],
        ["sample", None],
        ["stop"],
    ]
    for options in ({}, SEEDED):
        [sequence] = system.script(*todo, max_tokens=10, **options)
        assert sequence.tokens[:4] == [40, 42, 42, 50]
        assert len(sequence.tokens) == 5
    arg = {"do": todo}
    stream = system.client.generate(
        PROMPT, controller=SCRIPTED, controller_arg=arg, inspect=True, max_tokens=10
    )
    entries = [entry for entry in stream if entry.token is not None]
    assert entries[0].bias == {40: 100.0}
    assert entries[1].bias == {42: 100.0}
    assert entries[2].allowed == 2
    assert entries[2].bias[42] == 42 * 31 % 8 * 50.0
    assert entries[4].bias == {}
    with pytest.raises(ControllerError, match="the bias has token 99999; token ids of this model"):
        system.script(["sample", None, {"99999": 1.0}])


@steered
@pytest.mark.parametrize("sampling", [{}, SEEDED], ids=["greedy", "seeded"])
def test_a_controller_that_allows_everything_changes_no_token(
    system: System, how: Options, sampling: Options
) -> None:
    options: Options = {"max_tokens": 60, **sampling}
    [free] = system.run(**options)
    [got] = system.run(**options, **how)
    assert (got.tokens, got.text) == (free.tokens, free.text)
    assert (got.finish_reason, got.logs, got.error) == (free.finish_reason, "", None)
    assert got.logprobs == pytest.approx(free.logprobs, abs=1e-3)


def test_twenty_four_streams_at_once_steered_and_free_have_the_tokens_that_each_has_alone(
    system: System,
) -> None:
    options: list[Options] = [
        {"max_tokens": 12 + i % 9, "temperature": 0.9 * (i % 3 > 0), "seed": i} for i in range(24)
    ]
    prompts = [PROMPT + " # " + "x" * i for i in range(24)]
    alone = [system.run(p, **o)[0].tokens for p, o in zip(prompts, options, strict=True)]
    kinds: list[Options] = [*STEERED.values(), {}]
    streams = [
        system.client.generate(p, **o, **kinds[i % 4], timeout_s=300)
        for i, (p, o) in enumerate(zip(prompts, options, strict=True))
    ]
    assert [stream.tokens() for stream in streams] == alone


@steered
@pytest.mark.parametrize(
    "options",
    [
        {"stop": ["return"]},
        {"stop": ["\n"], "ignore_eos": True},
        {"max_tokens": 1},
        {"max_tokens": 7, "top_logprobs": 3},
        {"max_tokens": 9, "logit_bias": {198: -100.0, 40: 6.0}},
        {"max_tokens": 12, "repetition_penalty": 1.5, "top_p": 0.8, **SEEDED},
        {"max_tokens": 20, "text": False},
    ],
    ids=["stop", "newline", "one", "top", "bias", "penalty", "ids"],
)
def test_the_options_of_a_stream_do_what_they_do_without_a_controller(
    system: System, how: Options, options: Options
) -> None:
    [free] = system.run(**options)
    [got] = system.run(**options, **how)
    assert (got.tokens, got.text) == (free.tokens, free.text)
    assert got.finish_reason == free.finish_reason
    assert [list(top) for top in got.top_logprobs] == [list(top) for top in free.top_logprobs]


def test_one_worker_steers_models_of_two_vocabularies(system: System) -> None:
    for how in STEERED.values():
        options: Options = {"max_tokens": 20, "ignore_eos": True, **SEEDED}
        [free] = system.run(IDS, model=system.second, **options)
        [got] = system.run(IDS, model=system.second, **options, **how)
        assert got.tokens == free.tokens
    [got] = system.script(["append", "fox"], prompt=IDS, model=system.second, max_tokens=40)
    assert byte_level().decode(got.tokens).lstrip().startswith("fox")


# --- tokens that a controller appends and drops ---------------------------------------------------


def test_appended_tokens_are_where_they_belong_and_what_follows_follows_them(
    system: System,
) -> None:
    said = tokenizer().encode("\n    return a + b", add_special_tokens=False).ids
    [got] = system.script(["append", said], prompt=IDS, max_tokens=20, ignore_eos=True)
    [rest] = system.run([*IDS, *said], max_tokens=20 - len(said), ignore_eos=True)
    assert got.tokens == said + rest.tokens
    assert [math.isnan(p) for p in got.logprobs] == [True] * len(said) + [False] * len(rest.tokens)


def test_what_is_taken_back_is_gone_at_the_client(system: System) -> None:
    free = [["sample", None]] * 5
    options: Options = {"max_tokens": 30, "ignore_eos": True}
    [plain] = system.run(IDS, **options)
    do = [*free, ["splice", 3, [300, 301]], *free, ["splice", 2, []]]
    stream = system.client.generate(
        IDS, text=True, controller=SCRIPTED, controller_arg={"do": do, "tells": True}, **options
    )
    entries = list(stream)
    [got] = stream.sequences
    head = [*plain.tokens[:2], 300, 301]
    [rest] = system.run([*IDS, *head], max_tokens=26, ignore_eos=True)
    assert got.tokens == head + rest.tokens
    assert got.text == decoded(got.tokens)
    assert sum(entry.backtrack for entry in entries) == 5
    assert "[300, 301] 3\n" in got.logs
    assert "[] 2\n" in got.logs


def test_appended_tokens_beyond_max_tokens_end_with_length(system: System) -> None:
    for do in (
        [["append", [7] * 50]],
        [["sample", None], ["splice", 1, [7] * 50]],
        [["append", [7] * 50], ["stop"]],
        [["append", [7] * 50], ["fork", [[], []]]],
    ):
        [got] = system.script(*do, max_tokens=10)
        assert (got.tokens, got.finish_reason) == ([7] * 10, "length")


def test_a_buffer_that_a_steered_stream_saves_is_what_it_became(system: System) -> None:
    do = [["sample", None], ["append", [300, 301]], ["sample", None], ["splice", 2, [302]]]
    [got] = system.script(*do, prompt=IDS, max_tokens=8, ignore_eos=True, save="steered")
    assert got.tokens[1:3] == [300, 302]
    [again] = system.run([9], buffers=["steered"], max_tokens=5, ignore_eos=True)
    [wanted] = system.run([*IDS, *got.tokens, 9], max_tokens=5, ignore_eos=True)
    assert again.tokens == wanted.tokens


# --- forks ----------------------------------------------------------------------------------------


def test_forks_of_forks_are_a_tree_whose_branches_share_what_was_before(system: System) -> None:
    two = [["sample", None]] * 2
    inner = ["fork", [[["sample", [70]]], [["sample", [71]]], [["splice", 3, [72]]]]]
    do = [*two, ["fork", [[["sample", [60]]], [["sample", [61]], inner]]]]
    got = system.script(*do, max_tokens=12, ignore_eos=True, **SEEDED)
    free = system.run(max_tokens=12, ignore_eos=True, **SEEDED)[0].tokens
    assert [(s.seq, s.parent) for s in got] == [(0, None), (1, 0), (1025, 1), (1026, 1)]
    a, b = free[:2]
    assert got[0].tokens[:3] == [a, b, 60]
    assert got[1].tokens[:4] == [a, b, 61, 70]
    assert got[2].tokens[:4] == [a, b, 61, 71]
    assert got[3].tokens[:1] == [72]
    assert [s.finish_reason for s in got] == ["length"] * 4
    assert all(s.text == decoded(s.tokens) and len(s.tokens) == 12 for s in got)


def test_forks_of_the_first_round_share_the_prompt(system: System) -> None:
    prompt = [5 + i % 900 for i in range(700)]
    do = ["fork", [[["sample", [60 + i]]] for i in range(6)]]
    got = system.script(do, prompt=prompt, max_tokens=4, ignore_eos=True)
    assert [s.tokens[0] for s in got] == [60, 61, 62, 63, 64, 65]
    for one in got:
        [alone] = system.run([*prompt, one.tokens[0]], max_tokens=3, ignore_eos=True)
        assert one.tokens[1:] == alone.tokens


def test_the_fork_of_a_greedy_sequence_goes_on_where_its_parent_stops(system: System) -> None:
    do = [["sample", None], ["fork", [[["stop"]], [], []]]]
    got = system.script(*do, max_tokens=10, ignore_eos=True)
    free = system.run(max_tokens=10, ignore_eos=True)[0].tokens
    assert [s.tokens for s in got] == [free[:1], free, free]
    assert [s.finish_reason for s in got] == ["controller", "length", "length"]


def test_one_fork_fails_and_the_others_go_on(system: System) -> None:
    do = [["sample", None], ["fork", [[], [["fail", "I cannot"]], [["splice", 5, [7]]], []]]]
    got = system.script(*do, max_tokens=6, ignore_eos=True)
    assert [s.finish_reason for s in got] == ["length", "error", "error", "length"]
    assert (got[1].code, got[2].code) == ("controller_failed", "controller_failed")
    assert "I cannot" in (got[1].error or "")
    assert "drops 5 tokens; the sequence has 1" in (got[2].error or "")
    assert got[0].tokens == got[3].tokens


def test_a_fork_that_the_model_s_side_ends_wakes_who_waits_for_it(system: System) -> None:
    got = system.run(controller="guest", controller_arg="empty", max_tokens=6, timeout_s=300)
    assert "forbid all possible tokens" in (got[1].error or "")
    assert got[0].code == "deadlock"


# --- logs and writes ------------------------------------------------------------------------------


def test_logs_and_writes_come_with_the_tokens_that_they_led_to(system: System) -> None:
    step = ["sample", None]
    do = [
        *(["log", "zero"], ["set", "v", "0"], step),
        *(["log", "one"], ["append", [300]], ["log", "two"], ["set", "v", "2"], step),
        *(["log", "three"], ["stop"]),
    ]
    arg = {"do": do}
    stream = system.client.generate(PROMPT, controller=SCRIPTED, controller_arg=arg)
    entries = list(stream)
    said = [(e.pos, e.token is not None, e.logs) for e in entries if e.logs]
    assert said == [(0, True, "zero"), (1, True, "onetwo"), (3, False, "three")]
    written = [(e.pos, [w["WriteVar"]["value"] for w in e.storage]) for e in entries if e.storage]
    assert written == [(0, [b"0".hex()]), (1, [b"2".hex()])]
    [got] = stream.sequences
    assert (got.logs, len(got.storage), got.finish_reason) == ("zeroonetwothree", 2, "controller")


def test_the_last_round_s_log_comes_with_the_last_token(system: System) -> None:
    [got] = system.script(max_tokens=2, tells=True)
    assert got.logs == "".join(f"[{token}] 0\n" for token in got.tokens)


def test_a_controller_finds_the_special_tokens_of_its_model(system: System) -> None:
    names = [["special", name] for name in ("bos", "pad", "eos", "sep")]
    [got] = system.script(*names, ["stop"])
    assert got.logs.split() == ["0", "0", "0", "None"]
    [got] = system.script(*names, ["stop"], model=system.second)
    assert got.logs.split()[:2] == ["None", "None"]


def test_the_client_receives_what_a_python_controller_prints(system: System) -> None:
    step = ["sample", None]
    [got] = system.script(["print", "one"], step, ["print", "two"], ["stop"])
    assert got.logs == "one\none\ntwo\ntwo\n"


def test_a_log_that_is_too_long_says_how_much_was_dropped(system: System) -> None:
    [got] = system.script(["log", "x" * 100_000], ["log", "y"], max_tokens=1)
    assert got.logs == "x" * 65_536 + "\n[34465 more bytes of log were dropped]\n"


# --- suspension -----------------------------------------------------------------------------------


def test_a_suspended_fork_wakes_when_another_writes_a_variable(system: System) -> None:
    step = ["sample", None]
    waits = [step, ["log", "a"], ["wait", "ready"], ["log", "b"], ["append", [300]]]
    writes = [step, step, step, ["log", "c"], ["set", "ready", "yes"]]
    got = system.script(["fork", [waits, writes]], max_tokens=8, ignore_eos=True)
    assert [s.finish_reason for s in got] == ["length", "length"]
    assert got[0].tokens[:2] == [got[1].tokens[0], 300]
    assert [s.logs for s in got] == ["ab", "c"]
    assert got[1].tokens == system.run(max_tokens=8, ignore_eos=True)[0].tokens
    [rest] = system.run(
        [*tokenizer().encode(PROMPT).ids, *got[0].tokens[:2]], max_tokens=6, ignore_eos=True
    )
    assert got[0].tokens[2:] == rest.tokens


def test_a_suspended_sequence_wakes_when_a_fork_of_it_ends(system: System) -> None:
    step = ["sample", None]
    waits = [step, ["suspend"], ["log", "it ended"], ["stop"]]
    got = system.script(["fork", [waits, [step, step, ["stop"]]]], max_tokens=8, ignore_eos=True)
    assert (got[0].logs, got[0].finish_reason) == ("it ended", "controller")
    assert [len(s.tokens) for s in got] == [1, 2]


def test_a_sequence_that_wakes_may_fork(system: System) -> None:
    step = ["sample", None]
    waits = [step, ["suspend"], ["fork", [[["sample", [80]]], [["sample", [81]]]]]]
    got = system.script(["fork", [waits, [step, step, ["stop"]]]], max_tokens=5, ignore_eos=True)
    assert [(s.seq, s.parent) for s in got] == [(0, None), (1, 0), (2, 0)]
    assert got[0].tokens[:2] == [got[1].tokens[0], 80]
    assert got[2].tokens[:2] == [got[1].tokens[0], 81]


def test_a_lone_sequence_that_suspends_skips_a_round(system: System) -> None:
    do = [
        ["suspend"],
        ["log", "first"],
        ["sample", None],
        ["suspend"],
        ["suspend"],
        ["log", "last"],
    ]
    stream = system.client.generate(
        PROMPT, controller=SCRIPTED, controller_arg={"do": do}, max_tokens=4, ignore_eos=True
    )
    entries = list(stream)
    assert [entry.wakes for entry in entries] == [1, 2, 0, 0]
    [got] = stream.sequences
    assert (got.finish_reason, got.logs) == ("length", "firstlast")
    assert got.tokens == system.run(max_tokens=4, ignore_eos=True)[0].tokens


def test_a_request_whose_sequences_all_wait_ends_as_deadlocked(system: System) -> None:
    with pytest.raises(ControllerError, match="sequences of the request") as caught:
        system.script(["wait", "never"], timeout_s=300)
    assert caught.value.code == "deadlock"
    waits = [["sample", None], ["wait", "never"]]
    got = system.script(["fork", [waits, waits]], timeout_s=300)
    assert [s.code for s in got] == ["deadlock", "deadlock"]


# --- late controllers -----------------------------------------------------------------------------


def test_a_controller_that_decides_late_delays_its_own_stream_only(
    system: System, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    options: Options = {"max_tokens": 6, "ignore_eos": True}
    neighbour = Neighbour(system.client)
    with neighbour.running():
        late = system.client.generate(
            PROMPT, controller="scripted:Gated", controller_arg=str(gate), timeout_s=300, **options
        )
        entries = iter(late)
        for opened in range(1, 7):
            # While the decision is missing, the other stream continues.
            neighbour.wait_for_tokens(3)
            gate.write_bytes(bytes(opened))
            next(entries)
        assert list(entries) == []
    [got] = late.sequences
    assert got.tokens == system.run(**options)[0].tokens


def test_a_guest_that_computes_delays_its_own_stream_only(system: System) -> None:
    neighbour = Neighbour(system.client)
    with neighbour.running():
        late = system.client.generate(
            PROMPT, controller="guest", controller_arg="loop", max_tokens=9, ignore_eos=True
        )
        entries = iter(late)
        for _ in range(2):
            next(entries)
        before = neighbour.received
        with pytest.raises(ControllerError) as caught:
            list(entries)
        # The guest took two seconds of CPU time. If a batch had waited for it, the other stream
        # would have received about one token.
        assert neighbour.received - before > 5
    assert caught.value.code == "controller_timeout"


# --- the end of a sequence ------------------------------------------------------------------------


def test_an_end_of_sequence_token_ends_unless_its_controller_makes_more_of_it(
    system: System,
) -> None:
    end = ["sample", [EOS]]
    options: Options = {"max_tokens": 5}
    for do in ([end], [["eos_stops"], end]):
        [got] = system.script(*do, **options)
        assert (got.tokens, got.finish_reason) == ([EOS], "stop")
    [got] = system.script(end, ["append", [300]], ["sample", [301]], ["stop"], **options)
    assert (got.tokens, got.finish_reason) == ([EOS, 300, 301], "controller")
    [got] = system.script(end, ["splice", 1, [300]], ["stop"], **options)
    assert (got.tokens, got.finish_reason) == ([300], "controller")
    [got] = system.script(end, ["sample", [301]], ignore_eos=True, **options)
    assert (got.tokens[:2], got.finish_reason) == ([EOS, 301], "length")
    forks = system.script(end, ["fork", [[["sample", [300]]], [["stop"]]]], **options)
    assert [s.tokens[:2] for s in forks] == [[EOS, 300], [EOS]]
    [got] = system.script(["sample", [300]], end, max_tokens=2)
    assert (got.tokens, got.finish_reason) == ([300, EOS], "stop")


# --- errors ---------------------------------------------------------------------------------------


def test_an_unknown_controller_is_refused_with_the_names_of_those_there_are(
    system: System,
) -> None:
    with pytest.raises(RequestError, match="guest") as caught:
        system.run(controller="nobody")
    assert caught.value.code == "unknown_controller"


def test_without_a_controller_worker_a_stream_that_wants_one_is_refused(client: Client) -> None:
    with pytest.raises(UnavailableError, match="no controller worker is running") as caught:
        client.generate(PROMPT, controller="choice", retry_s=0).wait()
    assert caught.value.code == "no_worker"
    assert len(client.generate(PROMPT, max_tokens=3, ignore_eos=True).tokens()) == 3


def test_sequences_that_a_client_asks_for_have_a_controller_each(system: System) -> None:
    sequences = system.run(controller="regex", controller_arg="[a-z]{8}", n=5, temperature=1.5)
    assert sorted(sequence.seq for sequence in sequences) == [0, 1, 2, 3, 4]
    assert all(re.fullmatch("[a-z]{8}", sequence.text) for sequence in sequences)
    assert len({sequence.text for sequence in sequences}) > 1


def test_a_controller_that_fails_at_the_start_ends_its_stream_with_its_own_words(
    system: System,
) -> None:
    with pytest.raises(ControllerError, match="not today") as caught:
        system.run(controller="scripted:Unwilling")
    assert caught.value.code == "controller_failed"


def test_a_controller_that_fails_later_ends_its_stream_which_keeps_its_tokens(
    system: System,
) -> None:
    arg = {"do": [["sample", None], ["sample", None], ["log", "so far"], ["fail", "no more"]]}
    stream = system.client.generate(PROMPT, controller=SCRIPTED, controller_arg=arg)
    with pytest.raises(ControllerError, match="no more"):
        stream.wait()
    [got] = stream.sequences
    assert len(got.tokens) == 2
    assert got.logs.startswith("so far")


# --- controllers and blocks are freed -------------------------------------------------------------


def test_a_stream_that_is_left_frees_its_controllers_and_its_blocks(system: System) -> None:
    options: Options = {"max_tokens": 800, "ignore_eos": True}
    do = [["sample", None], ["fork", [[["sample", None], ["wait", "never"]], [], []]]]
    for controller, arg in ((SCRIPTED, {"do": do}), ("scripted:Slow", ""), ("guest", "mask")):
        stream = system.client.generate(
            PROMPT, controller=controller, controller_arg=arg, **options
        )
        for count, _ in enumerate(stream):
            if count == 6:
                break
    with pytest.raises(RequestTimeoutError):
        system.run(controller="scripted:Slow", timeout_s=0.5, **options)
    until(system.idle, 120.0, "the system is idle")
    assert all(process.alive for process in (*system.bus.workers, *system.bus.others))


def test_the_time_of_a_request_ends_while_its_sequences_wait(system: System) -> None:
    waits, decides_late = [["sample", None], ["wait", "never"]], [["sample", None], ["sleep", 3.0]]
    options: Options = {"max_tokens": 800, "ignore_eos": True, "timeout_s": 1.0}
    with pytest.raises(RequestTimeoutError):
        system.script(["fork", [waits, decides_late]], **options)
    until(system.idle, 120.0, "the system is idle")


def _program(rng: random.Random, depth: int = 0) -> list[list[Any]]:
    """Random commands for ``Scripted``, some of which fail."""
    some = [rng.randrange(1, 4096) for _ in range(rng.randrange(1, 5))]
    do: list[list[Any]] = []
    for kind in rng.choices(range(12), k=rng.randrange(7)):
        if kind == 0 and depth < 2:
            forks = [_program(rng, depth + 1) for _ in range(rng.randrange(1, 4))]
            return [*do, ["fork", forks]]
        more: dict[int, list[Any]] = {
            1: ["append", some],
            2: ["splice", rng.randrange(3), some],
            3: ["suspend"],
            4: ["set", "v", "x"],
            5: ["log", "l"],
            6: ["sleep", 0.02 * rng.random()],
            7: ["sample", some],
            8: ["stop"] if depth else ["log", "l"],
            9: ["fail", "f"] if depth == 2 else ["log", "l"],
        }
        do.append(more.get(kind, ["sample", None]))
    return do


def test_streams_with_random_controllers_all_end_and_leave_nothing(system: System) -> None:
    rng = random.Random(1)
    streams = []
    for i in range(150):
        arg = {"do": _program(rng)}
        options: Options = {"max_tokens": rng.randrange(1, 40), "temperature": 0.7, "seed": i}
        streams.append(
            system.client.generate(
                PROMPT, controller=SCRIPTED, controller_arg=arg, timeout_s=300, **options
            )
        )
    reasons: Counter[str] = Counter()
    for stream in streams:
        with contextlib.suppress(ControllerError):
            stream.wait()
        for one in stream.sequences:
            assert one.finish_reason is not None
            assert one.code in (None, "controller_failed", "deadlock")
            assert one.text == decoded(one.tokens)
            reasons[one.finish_reason] += 1
    assert reasons.keys() == {"stop", "length", "controller", "error"}
    until(system.idle, 120.0, "the system is idle")


def test_the_workers_have_nothing_to_complain_about(system: System) -> None:
    until(system.idle, 120.0, "the system is idle")
    for process in (*system.bus.workers, *system.bus.others):
        bad = (" ERROR ", "Traceback", "masks are sent")
        assert not [line for line in process.log.splitlines() if any(word in line for word in bad)]
