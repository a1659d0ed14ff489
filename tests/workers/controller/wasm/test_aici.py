"""Modules of the AICI ABI: what guests receive, and what their answers mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import wasmtime
from tokenbus.protocol.errors import ControllerError
from tokenbus.protocol.worker_messages import StepResult
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.variable_calls import SequenceVariables
from tokenbus.workers.controller.wasm.aici import AiciProgram
from tokenbus.workers.gpu.sampling.biases import read_bias
from tokenbus.workers.variables import VariableStorage

from .aici_guests import EOS, LIMITS, VOCABULARY, Request, puppet, ticking_engine

pytestmark = pytest.mark.process

Puppets = Callable[..., Request]


@pytest.fixture(scope="module")
def engine() -> Iterator[wasmtime.Engine]:
    with ticking_engine() as engine:
        yield engine


@pytest.fixture
def puppets(engine: wasmtime.Engine) -> Iterator[Puppets]:
    """Makes requests whose guests execute these lines."""
    made: list[Request] = []

    def make(*lines: str) -> Request:
        made.append(Request(engine, puppet(), "\n".join(lines)))
        return made[-1]

    yield make
    for request in made:
        request.close()


def one(results: list[StepResult]) -> StepResult:
    """The only result. Fails if it is an error."""
    [result] = results
    assert result.error is None
    return result


# --- input of a guest -----------------------------------------------------------------------------


def test_a_module_starts_before_it_gets_the_prompt(puppets: Puppets) -> None:
    lines = [f"{call} log {call}" for call in ("start", "init", "create", "prompt", "pre", "mid")]
    assert one(puppets(*lines).begin()).logs.split() == [line.split()[0] for line in lines]


def test_a_module_without_start_functions_starts(engine: wasmtime.Engine) -> None:
    calls = ["init_prompt", "pre_process", "mid_process", "post_process"]
    stops = "\n".join(f'(func (export "aici_{call}") (param i32) (call $give))' for call in calls)
    wat = f"""
      (module
        (import "env" "aici_host_return_process_result" (func $give_at (param i32 i32)))
        (memory (export "memory") 1)
        (data (i32.const 8) "{{\\22attention_masks\\22:[]}}")
        (func $give (call $give_at (i32.const 8) (i32.const 22)))
        (func (export "aici_init"))
        (func (export "aici_create") (result i32) (i32.const -1))
        {stops})
    """
    assert one(Request(engine, bytes(wasmtime.wat2wasm(wat))).begin()).action == "stop"


def test_each_call_has_its_argument(puppets: Puppets) -> None:
    request = puppets(
        "prompt arg",
        "pre arg",
        'pre = {"attention_masks":[[],[]],"suspend":false,"ff_tokens":[]}',
        "mid arg",
        "post arg",
        "pre arg",
        "mid arg",
    )
    first, *both = request.begin([1, 2, 3])
    assert first.logs == '{"prompt":[1,2,3]}\n{}\n'
    assert [result.logs for result in both] == ['{"fork_group":[0,1]}\n'] * 2
    again = one(request.sampled(1, 65))
    assert again.logs == '{"tokens":[65],"backtrack":0}\n{}\n{"fork_group":[1]}\n'


def test_a_guest_finds_its_argument_its_id_and_the_end_token(puppets: Puppets) -> None:
    lines = ["create module_arg", "create seq", "create eos"]
    assert one(puppets(*lines).begin()).logs == "\n".join(lines) + f"\n0\n{EOS}\n"


def test_a_guest_finds_the_special_tokens_by_aici_s_numbers(puppets: Puppets) -> None:
    lines = [f"create special {number}" for number in (*range(9), 9, 4_000_000_000)]
    found = [int(line) for line in one(puppets(*lines).begin()).logs.split()]
    none = 2**32 - 1
    assert found == [10, none, 12, 13, EOS, none, none, none, 18, none, none]


def test_a_guest_learns_what_is_supported(puppets: Puppets) -> None:
    names = ["fork", "backtrack", "ff_tokens", "attention", ""]
    lines = [f"create config {name}" for name in names]
    assert one(puppets(*lines).begin()).logs.split() == ["1", "1", "1", "0", "0"]


def test_text_becomes_tokens(puppets: Puppets) -> None:
    logs = one(puppets("create tokenize yes, the red").begin()).logs
    assert VOCABULARY.bytes_of([int(line) for line in logs.split()]) == b"yes, the red"


def test_a_blob_that_is_larger_than_was_guessed_returns_its_size(puppets: Puppets) -> None:
    assert one(puppets("create trie").begin()).logs == f"{len(VOCABULARY.trie)}\n"


def test_the_tokens_of_the_sequence_can_be_asked_for(puppets: Puppets) -> None:
    request = puppets(
        "mid tokens",
        "post tokens",
        'mid = {"Splice":{"backtrack":2,"ff_tokens":[7,8]}}',
        "post tokens",
    )
    assert one(request.begin([1, 2])).logs.split() == ["1", "2"]
    assert one(request.sampled(0, 65)).logs.split() == ["1", "2", "65", "1", "2", "7", "8"]


def test_a_fork_keeps_the_blobs_that_its_parent_had(puppets: Puppets) -> None:
    request = puppets(
        "pre tokenize red",
        'pre = {"attention_masks":[[],[]]}',
        "mid poke read_blob 4 0 0",
        "mid seq",
    )
    assert [result.logs for result in request.begin()] == ["264\n", "4\n0\n", "4\n1\n"]


# --- masks ----------------------------------------------------------------------------------------


def test_only_what_the_mask_allows_may_be_sampled(puppets: Puppets) -> None:
    request = puppets("mid mask 65", "mid mask 266", 'mid = {"SampleWithBias":{}}')
    assert one(request.begin()).attachment == 0
    assert request.may_sample() == [266], "the last mask applies"


def test_without_a_mask_in_this_call_every_token_is_allowed(puppets: Puppets) -> None:
    request = puppets("mid mask 65", 'mid = {"SampleWithBias":{}}', "post log next")
    assert one(request.begin()).attachment == 0
    assert one(request.sampled(0, 65)).attachment is None


def test_a_result_may_have_a_bias_next_to_the_mask(puppets: Puppets) -> None:
    values = ["0"] * VOCABULARY.size
    values[66], values[65] = "2.5", "null"
    biased = '{"SampleWithBias":{"bias":[' + ",".join(values) + "]}}"
    request = puppets("mid mask 65", f"mid = {biased}", "post log next")
    first = one(request.begin())
    assert (first.attachment, first.bias_attachment) == (0, 0)
    bias = read_bias(np.frombuffer(request.sequences[0].bias, dtype=np.uint32), VOCABULARY.size)
    assert [bias.of(token) for token in (64, 65, 66)] == [0.0, float("-inf"), 2.5]
    assert not one(request.sampled(0, 66)).biased


@pytest.mark.parametrize("call", ["start", "init", "create", "prompt", "pre", "post"])
def test_a_mask_outside_of_mid_process_is_an_error(puppets: Puppets, call: str) -> None:
    request = puppets(f"{call} mask 65")
    message = "aici_host_return_logit_bias was called outside of aici_mid_process"
    if call in ("start", "init", "create"):
        with pytest.raises(ControllerError, match=message):
            request.begin()
        return
    results = request.begin()
    if call == "post":
        results = request.sampled(0, 65)
    assert message in (results[0].error or "")


# --- meaning of answers ---------------------------------------------------------------------------


def test_a_splice_counts_the_token_about_to_be_generated(puppets: Puppets) -> None:
    request = puppets(
        "post log one",
        "post log two",
        'post = {"stop":false}',
        'mid = {"Splice":{"backtrack":2,"ff_tokens":[98,99]}}',
        "post arg",
    )
    request.begin([1])
    request.tokens[0].append(97)
    result = one(request.sampled(0, 97))
    assert (result.action, result.backtrack, result.ff_tokens) == ("sample", 1, [98, 99])
    assert result.logs.endswith('{"tokens":[98,99],"backtrack":1}\n')


def test_pre_process_appends_without_mid_process_in_between(puppets: Puppets) -> None:
    request = puppets(
        'pre = {"attention_masks":[[]],"suspend":false,"ff_tokens":[97,98]}', "post arg", "pre arg"
    )
    result = one(request.begin())
    assert result.ff_tokens == [97, 98]
    assert result.logs == '{"tokens":[97,98],"backtrack":0}\n{}\n'


def test_pre_process_appends_before_it_forks(puppets: Puppets) -> None:
    request = puppets(
        'pre = {"attention_masks":[[],[]],"suspend":false,"ff_tokens":[97,98]}',
        "post arg",
        "mid arg",
    )
    forked, *others = request.begin()
    assert (forked.action, forked.ff_tokens, forked.children) == ("fork", [97, 98], [1])
    assert forked.logs == '{"tokens":[97,98],"backtrack":0}\n'
    assert [(result.seq, result.action, result.ff_tokens) for result in others] == [
        (0, "sample", []),
        (1, "sample", []),
    ]
    assert [result.logs for result in others] == ['{"fork_group":[0,1]}\n'] * 2


def test_post_process_may_stop(puppets: Puppets) -> None:
    request = puppets('post = {"stop":true}')
    request.begin()
    assert one(request.sampled(0, 65)).action == "stop"


def test_of_two_results_the_last_counts(puppets: Puppets) -> None:
    request = puppets("mid say nonsense", 'mid = "Stop"')
    assert one(request.begin()).action == "stop"


@pytest.mark.parametrize("call", ["prompt", "pre", "mid", "post"])
def test_a_call_without_a_result_is_an_error(puppets: Puppets, call: str) -> None:
    request = puppets(f"{call} silent")
    [result] = request.begin()
    if call == "post":
        [result] = request.sampled(0, 65)
    name = "init_prompt" if call == "prompt" else f"{call}_process"
    assert result.error == (
        f"{name} returned without a result: aici_{name} has to call aici_host_return_process_result"
    )


def test_a_guest_that_stops_itself_gives_what_it_printed(puppets: Puppets) -> None:
    request = puppets("pre log earlier", "mid log no such file:", "mid log fine.txt", "mid stop")
    [result] = request.begin()
    assert result.error == "mid_process: no such file:\nfine.txt"
    assert result.logs == "earlier\nno such file:\nfine.txt\n", "the text is in the log too"


def test_a_guest_that_stops_itself_without_a_log_is_reported_as_that(puppets: Puppets) -> None:
    [result] = puppets("pre log earlier", "mid stop").begin()
    assert "mid_process: it stopped itself with aici_host_stop" in (result.error or "")


# --- forks ----------------------------------------------------------------------------------------


def test_a_fork_has_the_state_of_its_parent_and_its_own_id(puppets: Puppets) -> None:
    request = puppets(
        'pre = {"attention_masks":[[],[],[]]}',
        "mid seq",
        'mid = {"SampleWithBias":{}}',
        'pre = {"attention_masks":[[],[]]}',
        "mid seq",
    )
    forked, *rest = request.begin()
    assert forked.children == [1, 2]
    assert [result.logs for result in rest] == ["0\n", "1\n", "2\n"]
    forked, *rest = request.sampled(1, 65)
    assert forked.children == [3]
    assert [result.logs for result in rest] == ["1\n", "3\n"]
    assert request.text(3) == b"A"


def test_a_module_that_cannot_be_copied_does_not_fork(engine: wasmtime.Engine) -> None:
    program = AiciProgram(engine, wasmtime.Module(engine, puppet()), "it changes its tables")
    variables = SequenceVariables(1, 0, VariableStorage().apply, lambda: None)
    host = Host(1, 0, b"", VOCABULARY, variables, Log(1000), LIMITS)
    controller = program.start(host)
    with pytest.raises(ControllerError, match="cannot fork"):
        controller.fork(host)
    controller.close()


def test_a_suspended_fork_goes_on_when_another_writes(puppets: Puppets) -> None:
    request = puppets(
        'pre = {"attention_masks":[[],[]]}',
        'mid = {"SampleWithBias":{}}',
        'pre only 0 = {"attention_masks":[[]],"suspend":true}',
        'pre only 1 storage {"WriteVar":{"name":"a","value":"01","op":"Append"}}',
        'pre only 1 = {"attention_masks":[]}',
        'pre storage {"ReadVar":{"name":"a"}}',
    )
    request.begin()
    assert one(request.sampled(0, 65)).action == "suspend"
    stopped, woken = request.sampled(1, 66)
    assert (stopped.seq, stopped.action) == (1, "stop")
    assert (woken.seq, woken.action) == (0, "sample")
    assert woken.logs == '{"ReadVar":{"version":1,"value":"01"}}\n'


# --- storage --------------------------------------------------------------------------------------


def test_a_write_is_sent_to_the_client_as_the_guest_gave_it(puppets: Puppets) -> None:
    command = '{"WriteVar":{"name":"ä","value":"00ff","op":"Append","when_version_is":0}}'
    result = one(puppets(f"mid storage {command}", f"mid storage {command}").begin())
    assert result.storage == [json.loads(command)], "only the write that was done"
    assert result.logs == ('{"WriteVar":{"version":1}}\n{"ReadVar":{"version":1,"value":"00ff"}}\n')
