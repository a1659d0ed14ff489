"""Hostile modules of the AICI ABI: each ends with a clear error, and other guests are
unaffected."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import wasmtime
from tokenbus.protocol.errors import Code, ControllerError
from tokenbus.protocol.worker_messages import StepResult
from tokenbus.workers.controller.wasm.instance import Guest

from .aici_guests import LIMITS, Request, puppet, ticking_engine

pytestmark = pytest.mark.process

PAST = 70_000_000
"""An address beyond the memory that a guest may have."""
LAST = 2**32 - 1
STARTING = ("start", "init", "create")
NAMES = {
    "start": "_start",
    "init": "aici_init",
    "create": "aici_create",
    "prompt": "init_prompt",
    "pre": "pre_process",
    "mid": "mid_process",
    "post": "post_process",
}


@pytest.fixture(scope="module")
def engine() -> Iterator[wasmtime.Engine]:
    with ticking_engine() as engine:
        yield engine


def play(engine: wasmtime.Engine, arg: str | bytes) -> StepResult:
    """The result of the second round, or of the first if the first ends the sequence. An error of
    the start is returned as a result."""
    request = Request(engine, puppet(), arg)
    try:
        [result] = request.begin([1, 2])
        if result.action == "sample":
            [result] = request.sampled(0, 65)
    except ControllerError as error:
        return StepResult(1, 0, "error", error=error.message, code=str(error.code))
    finally:
        request.close()
    return result


def failure(engine: wasmtime.Engine, arg: str | bytes) -> str:
    """The error of a guest that fails. Fails unless another guest of the engine continues."""
    beside = Request(engine, puppet(), "mid mask 65")
    assert beside.begin()[0].error is None
    result = play(engine, arg)
    assert beside.sampled(0, 65)[0].error is None
    beside.close()
    assert result.action == "error"
    assert result.code == Code.CONTROLLER_FAILED
    assert result.error
    assert result.error.isprintable()
    assert len(result.error) < 1000
    return result.error


# --- time, stack, memory --------------------------------------------------------------------------


@pytest.mark.parametrize("call", NAMES)
def test_an_endless_loop_is_stopped_in_each_call(engine: wasmtime.Engine, call: str) -> None:
    result = play(engine, f"{call} loop")
    assert result.code == Code.CONTROLLER_TIMEOUT
    limit = {"pre": LIMITS.pre_s, "mid": LIMITS.mid_s, "post": LIMITS.post_s}.get(
        call, LIMITS.init_s
    )
    assert result.error == f"{NAMES[call]} ran for longer than its {limit * 1000:g} ms"


@pytest.mark.parametrize("call", NAMES)
def test_an_endless_recursion_is_stopped_in_each_call(engine: wasmtime.Engine, call: str) -> None:
    error = failure(engine, f"{call} recurse")
    assert error.startswith(NAMES[call])


@pytest.mark.parametrize("call", NAMES)
def test_a_trap_is_reported_with_its_call(engine: wasmtime.Engine, call: str) -> None:
    assert failure(engine, f"{call} nonsense").startswith(f"{NAMES[call]}: it trapped")


def test_memory_has_an_end(engine: wasmtime.Engine) -> None:
    result = play(engine, "prompt grow\nmid log still here")
    assert result.error is None


def test_blobs_do_not_pile_up(engine: wasmtime.Engine) -> None:
    result = play(engine, "prompt blobs 100\nprompt poke read_blob 4 0 0\nprompt poke read_blob 7")
    assert result.error is not None
    assert "the guest read blob 7, which does not exist" in result.error


def test_exiting_is_a_failure(engine: wasmtime.Engine) -> None:
    assert failure(engine, "mid poke proc_exit 3") == ("mid_process: the guest exited with code 3")


# --- pointers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        "read_blob 1 {} 4",
        "return_process_result {} 4",
        "return_process_result 8 {}",
        "return_logit_bias {}",
        "tokenize {} 4",
        "tokenize 8 {}",
        "storage_cmd {} 40",
        "storage_cmd 8 {}",
        "get_config {} 4",
        "fd_write 1 {} 1 8",
        "fd_write 2 8 0 {}",
        "fd_write_piece {} 4",
        "fd_write_piece 8 {}",
        "fd_fdstat_get 1 {}",
        "random_get {} 4",
        "random_get 8 {}",
        "clock_time_get 0 {}",
        "args_sizes_get 8 {}",
        "args_sizes_get {} 8",
        "environ_sizes_get 8 {}",
        "environ_sizes_get {} 8",
    ],
)
@pytest.mark.parametrize("address", [PAST, LAST])
def test_a_pointer_out_of_bounds_is_reported(
    engine: wasmtime.Engine, call: str, address: int
) -> None:
    error = failure(engine, f"mid poke {call.format(address)}")
    assert error.startswith("mid_process: ")
    assert str(address) in error


def test_a_mask_that_ends_outside_of_memory_is_reported(engine: wasmtime.Engine) -> None:
    size = 64 * 1024 * 1024
    request = Request(engine, puppet(), f"prompt grow\nmid poke return_logit_bias {size - 32}")
    [result] = request.begin()
    assert "36 bytes" in (result.error or "")
    request.close()


@pytest.mark.parametrize("blob", [0, 7, 4711, LAST])
def test_an_unknown_blob_is_reported(engine: wasmtime.Engine, blob: int) -> None:
    error = failure(engine, f"mid poke read_blob {blob} 8 8")
    assert error == f"mid_process: the guest read blob {blob}, which does not exist"


def test_a_blob_that_is_not_there_yet_is_reported(engine: wasmtime.Engine) -> None:
    error = failure(engine, "create poke read_blob 5 8 8")
    assert "the answer to a storage command (aici_host_storage_cmd), before it existed" in error


# --- JSON -----------------------------------------------------------------------------------------

GARBAGE = [
    b"",
    b"nonsense",
    b"{",
    b"[]",
    b"null",
    b"17",
    b"\xff\xfe",
    b"{} {}",
    b'"Go"',
]
WRONG = {
    "prompt": [],
    "pre": [
        b"{}",
        b'{"attention_masks":null}',
        b'{"attention_masks":[1]}',
        b'{"attention_masks":[["a"]]}',
        b'{"attention_masks":[[]],"suspend":1}',
        b'{"attention_masks":[[]],"ff_tokens":[-1]}',
        b'{"attention_masks":[[]],"ff_tokens":[4294967296]}',
        b'{"attention_masks":[[]],"ff_tokens":[1.5]}',
        b'{"attention_masks":[[0]]}',
        b'{"attention_masks":[[]],"ff_tokens":[267]}',
    ],
    "mid": [
        b"{}",
        b'{"Sample":{}}',
        b'{"SampleWithBias":null}',
        b'{"Stop":{},"SampleWithBias":{}}',
        b'{"Splice":{}}',
        b'{"Splice":{"backtrack":-1,"ff_tokens":[1]}}',
        b'{"Splice":{"backtrack":1,"ff_tokens":[-1]}}',
        b'{"Splice":{"backtrack":1,"ff_tokens":7}}',
        b'{"Splice":{"backtrack":18446744073709551616,"ff_tokens":[]}}',
        b'{"Splice":{"backtrack":0,"ff_tokens":[]}}',
        b'{"Splice":{"backtrack":1000,"ff_tokens":[1]}}',
        b'{"Splice":{"backtrack":1,"ff_tokens":[267]}}',
    ],
    "post": [b"{}", b'{"stop":null}', b'{"stop":0}'],
}


@pytest.mark.parametrize(
    ("call", "result"),
    [(call, result) for call, wrong in WRONG.items() for result in [*GARBAGE, *wrong]],
)
def test_a_wrong_result_is_shown(engine: wasmtime.Engine, call: str, result: bytes) -> None:
    error = failure(engine, b"%b = %b" % (call.encode(), result))
    if result in GARBAGE:
        assert error.startswith(f"{NAMES[call]} returned ")
        assert "expected" in error


@pytest.mark.parametrize("call", WRONG)
def test_a_result_that_is_nested_without_end_is_reported(
    engine: wasmtime.Engine, call: str
) -> None:
    error = failure(engine, f'{call} = {{"x":{"[" * 50_000}')
    assert "returned JSON with 50001 lists and objects; at most 1024 are allowed" in error


def test_a_long_result_is_shown_in_part(engine: wasmtime.Engine) -> None:
    assert "[[[[… (1000 bytes)" in failure(engine, "mid fill 1000")


def test_a_result_that_is_too_long_is_refused(engine: wasmtime.Engine) -> None:
    assert "a result may have at most 1048576 bytes; this one has 5000000" in failure(
        engine, "mid fill 5000000"
    )


def test_a_value_that_a_short_command_reads_is_work_of_the_guest(
    engine: wasmtime.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    charged: list[int] = []
    charge = Guest.charge

    def counted(guest: Guest, size: int) -> None:
        charged.append(size)
        charge(guest, size)

    monkeypatch.setattr(Guest, "charge", counted)
    written = json.dumps({"WriteVar": {"name": "a", "value": "ab" * 9000, "op": "Set"}})
    read = '{"ReadVar":{"name":"a"}}'
    request = Request(engine, puppet(), f"mid storage {written}\npost storage {read}")
    request.begin()
    charged.clear()
    request.sampled(0, 65)
    assert 4 * 2 * 9000 < max(charged) < 5 * 2 * 9000
    request.close()


def test_forks_without_end_are_refused_by_whoever_makes_them(engine: wasmtime.Engine) -> None:
    masks = ",".join(["[]"] * 1000)
    request = Request(engine, puppet(), f'pre = {{"attention_masks":[{masks}]}}')
    made = []
    request._fork = lambda parent, more: made.append(more) or []  # type: ignore
    request._rounds._fork = request._fork
    request.begin()
    assert made == [999]


# --- storage --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (b"", "the storage command nothing"),
        (b"nonsense", "the storage command nonsense"),
        (b"{}", "not exactly one storage command"),
        (b'{"DropVar":{"name":"a"}}', "unknown field `DropVar`"),
        (b'{"ReadVar":{}}', "missing required field `name`"),
        (b'{"ReadVar":{"name":"\xff\xfe"}}', r'{"ReadVar":{"name":"\xff\xfe"}}: '),
        (
            b'{"ReadVar":{"name":"a"},"WriteVar":{"name":"a","value":"","op":"Set"}}',
            "not exactly one",
        ),
        (b'{"WriteVar":{"name":"a","value":"0","op":"Set"}}', "hexadecimal"),
        (b'{"WriteVar":{"name":"a","value":"0g","op":"Set"}}', "hexadecimal"),
        (b'{"WriteVar":{"name":"a","value":"0 0 ","op":"Set"}}', "hexadecimal"),
        (b'{"WriteVar":{"name":"a","value":"\xc3\xa4","op":"Set"}}', "hexadecimal"),
        (b'{"WriteVar":{"name":"a","value":"","op":"Drop"}}', "Invalid enum value 'Drop'"),
        (b'{"WriteVar":{"name":"a","value":"","op":"Set","when_version_is":-1}}', ">= 0"),
        (
            b'{"ReadVar":{"name":"%b"}}' % (b"a" * 257),
            "has 257 bytes of UTF-8; a name has 1 to 256",
        ),
        (b'{"ReadVar":{"name":""}}', "a name has 1 to 256"),
        (b'{"ReadVar":{"name":"%b"}}' % (b"[" * 40_000), "a name has 1 to 256"),
    ],
)
def test_a_wrong_storage_command_is_reported(
    engine: wasmtime.Engine, command: bytes, message: str
) -> None:
    error = failure(engine, b"mid storage " + command)
    assert error.startswith("mid_process: ")
    assert message in error


# --- errors before the instance exists ------------------------------------------------------------


def test_a_start_section_that_calls_the_host_is_reported(engine: wasmtime.Engine) -> None:
    calls = ["init_prompt", "pre_process", "mid_process", "post_process"]
    exports = "\n".join(f'(func (export "aici_{call}") (param i32))' for call in calls)
    wat = f"""
      (module
        (import "env" "aici_host_read_blob" (func $read (param i32 i32 i32) (result i32)))
        (memory (export "memory") 1)
        (func $start (drop (call $read (i32.const 1) (i32.const 0) (i32.const 4))))
        (start $start)
        (func (export "aici_init"))
        (func (export "aici_create") (result i32) (i32.const 0))
        {exports})
    """
    with pytest.raises(ControllerError, match="start"):
        Request(engine, bytes(wasmtime.wat2wasm(wat)), b"argument").begin()
