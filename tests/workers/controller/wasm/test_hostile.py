"""Hostile guests, through a whole system: each ends with a clear error, and nothing else does.

While each of them runs, so does a stream with a well-behaved controller in the same controller
worker: it has the tokens that it has alone, and goes on. How much slower its steps become is
measured by ``benchmarks/isolation.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from tokenbus.clients import Client, ControllerError, RequestError, TokenbusError
from tokenbus.clients.results import GeneratedSequence

from ....processes import Bus, Process
from .aici_guests import puppet
from .hostile.guests import (
    COUNT,
    DROP,
    FREE,
    LIST,
    LOOP,
    MASK,
    MASK_AT,
    RECURSE,
    N,
    call,
    guest,
    set_word,
    times,
    until_refused,
)
from .hostile.neighbour import Neighbour

INIT_MS = 400.0
"""Shorter than the default, so that these tests are."""
CALM_TOKENS = 12
FORK_ONCE = """(if (i32.eq (global.get $round) (i32.const 1)) (then
    (i32.store (i32.const 1056) (i32.const %d)) (return (i32.const 3))))"""
Made = TypeVar("Made")


class System:
    """A broker, a worker of each role, and a stream that runs while others do."""

    def __init__(self, bus: Bus, worker: Process, client: Client) -> None:
        self.bus, self.worker, self.client = bus, worker, client
        self.neighbour = Neighbour(client, "calm")
        self._calm = self.calm()

    def calm(self) -> list[int]:
        """The tokens of a well-behaved request."""
        return self.run("calm", max_tokens=CALM_TOKENS)[0].tokens

    def run(self, controller: str | bytes, **options: Any) -> list[GeneratedSequence]:
        """A request to its end; a module is uploaded first."""
        name = controller if isinstance(controller, str) else self.upload(controller)
        given = {"max_tokens": 5, "ignore_eos": True, "timeout_s": 300.0, "text": False} | options
        return self.client.generate("x = 1", controller=name, **given).wait()

    def upload(self, wasm: bytes) -> str:
        return self.client.upload_controller(wasm).module

    def undisturbed(self, act: Callable[[], Made]) -> Made:
        """Does it while a well-behaved stream runs: that goes on, and so does the worker."""
        with self.neighbour.running():
            made = act()
        assert self.worker.alive, self.worker.log
        assert self.calm() == self._calm
        return made

    def fails(self, controller: bytes | str, **options: Any) -> TokenbusError:
        """The error that a guest brings to its own client."""
        name = controller if isinstance(controller, str) else self.upload(controller)

        def act() -> TokenbusError:
            with pytest.raises(TokenbusError) as caught:
                self.run(name, **options)
            return caught.value

        return self.undisturbed(act)

    def controller_error(self, controller: bytes | str, **options: Any) -> str:
        """The text of an error that is a controller's own failure."""
        error = self.fails(controller, **options)
        assert type(error) is ControllerError
        assert error.code == "controller_failed"
        assert error.message.isprintable()
        return error.message

    def refusal(self, wasm: bytes) -> RequestError:
        """Why a module is not taken."""

        def act() -> RequestError:
            with pytest.raises(RequestError) as caught:
                self.client.upload_controller(wasm)
            return caught.value

        error = self.undisturbed(act)
        assert type(error) is RequestError
        assert error.path == "$.data"
        return error


@pytest.fixture(scope="module")
def system(processes: None) -> Iterator[System]:
    with Bus(controller_init_ms=INIT_MS) as bus:
        bus.start_worker()
        worker = bus.start_other("controller")
        bus.start_other("state")
        bus.wait_for_models("embedded")
        bus.wait_for_roles("controller", "state")
        with bus.client() as client:
            client.upload_controller(guest(), tag="calm")
            yield System(bus, worker, client)
            assert worker.alive


# --- time and stack -------------------------------------------------------------------------------

INITIALIZE = f'(func (export "_initialize") {LOOP})'
START = "(func $begin %s) (start $begin)"
LOOPS = {
    "start": ({"more": START % LOOP}, INIT_MS),
    "_initialize": ({"more": INITIALIZE}, INIT_MS),
    "tokenbus_abi_v1": ({"abi": LOOP}, INIT_MS),
    "tokenbus_grow": ({"grow": LOOP}, INIT_MS),
    "init_prompt": ({"init": LOOP}, INIT_MS),
    "pre_process": ({"pre": LOOP}, 1),
    "mid_process": ({"mid": LOOP}, 20),
    "post_process": ({"post": LOOP}, 1),
}


@pytest.mark.parametrize("phase", LOOPS)
def test_an_endless_loop_is_stopped_in_each_phase(system: System, phase: str) -> None:
    calls, limit_ms = LOOPS[phase]
    # An argument for which the inbox is too small, so that it is grown.
    error = system.fails(guest(**calls), controller_arg="x" * 5000 if "grow" in calls else "")
    assert type(error) is ControllerError
    assert error.code == "controller_timeout"
    assert error.message == f"{phase} ran for longer than its {limit_ms:g} ms"


@pytest.mark.parametrize(
    "body",
    [
        "(call $log (i32.const 0) (i32.const 0))",
        "(drop (call $var_get (i32.const 512) (i32.const 4) (i32.const 0) (i32.const 0) "
        "(i32.const 0)))",
        "(drop (call $tokenize (i32.const 0) (i32.const 60000) (i32.const 0) (i32.const 0)))",
        "(drop (call $trie_read (i32.const 0) (i32.const 0) (i32.const 4096)))",
    ],
    ids=["log", "var_get", "tokenize", "trie_read"],
)
def test_time_in_the_host_counts_too(system: System, body: str) -> None:
    error = system.fails(guest(mid=f"(loop $ever {body} (br $ever))"))
    assert error.code == "controller_timeout"
    assert error.message == "mid_process ran for longer than its 20 ms"


@pytest.mark.parametrize(
    ("phase", "calls"),
    [
        ("start", {"more": START % RECURSE}),
        ("tokenbus_abi_v1", {"abi": RECURSE}),
        ("init_prompt", {"init": RECURSE}),
        ("pre_process", {"pre": RECURSE}),
        ("mid_process", {"mid": RECURSE}),
        ("post_process", {"post": RECURSE}),
    ],
)
def test_an_endless_recursion_is_stopped_in_each_phase(
    system: System, phase: str, calls: dict[str, str]
) -> None:
    assert system.controller_error(guest(**calls)).startswith(
        f"{phase}: its stack of 524288 bytes overflowed, in recurse < recurse"
    )


@pytest.mark.parametrize(
    ("phase", "calls"),
    [
        ("start", {"more": START % "unreachable"}),
        ("tokenbus_abi_v1", {"abi": "unreachable"}),
        ("init_prompt", {"init": "unreachable"}),
        ("pre_process", {"pre": "unreachable"}),
        ("mid_process", {"mid": "unreachable"}),
        ("post_process", {"post": "unreachable"}),
    ],
)
def test_a_trap_is_told_of_with_its_phase(
    system: System, phase: str, calls: dict[str, str]
) -> None:
    assert system.controller_error(guest(**calls)).startswith(f"{phase}: it trapped (unreachable")


# --- memory, tables, logs -------------------------------------------------------------------------

TOUCH = """(local.set $i (i32.const 0))
    (loop $again (i32.store8 (local.get $i) (i32.const 1))
      (local.set $i (i32.add (local.get $i) (i32.const 4096)))
      (br_if $again (i32.lt_u (local.get $i) (i32.mul (memory.size) (i32.const 65536)))))"""
GROW = until_refused("(memory.grow (i32.const 1))")


def test_memory_ends_where_it_must_and_all_of_it_can_be_used(system: System) -> None:
    # The pages that it has in the end, as characters of its log.
    keep = "(global.set $kept (memory.size))"
    wasm = guest(
        init=GROW + TOUCH + keep,
        mid=f"{set_word(MASK_AT, 0)} (if (i32.ne (global.get $kept) (i32.const 1024)) "
        "(then unreachable))",
    )
    name = system.upload(wasm)
    [sequence] = system.undisturbed(lambda: system.run(name))
    assert (sequence.finish_reason, sequence.error, len(sequence.tokens)) == ("length", None, 5)


def test_memory_beyond_the_end_is_not_there(system: System) -> None:
    beyond = "(i32.store8 (i32.mul (memory.size) (i32.const 65536)) (i32.const 1))"
    error = system.controller_error(guest(init=GROW + TOUCH + beyond))
    assert error.startswith("init_prompt: it reached outside its memory")


def test_an_allocator_that_aborts_without_memory_fails(system: System) -> None:
    abort = "(if (i32.eq (memory.grow (i32.const 65000)) (i32.const -1)) (then unreachable))"
    assert system.controller_error(guest(mid=abort)).startswith("mid_process: it trapped")


def test_a_hundred_forks_of_much_memory_are_refused(system: System) -> None:
    assert system.controller_error(guest(init=GROW + TOUCH, pre=FORK_ONCE % 100)) == (
        "it forks with a memory of 67108864 bytes; with so many sequences in the request, each may "
        "have at most 10737418"
    )


def test_a_hundred_forks_cannot_each_take_much_memory(system: System) -> None:
    grow = "(if (i32.eq (memory.grow (i32.const 1000)) (i32.const -1)) (then %s))"
    name = system.upload(guest(pre=FORK_ONCE % 100, mid=grow % call("log", 512, 4)))
    sequences = system.undisturbed(lambda: system.run(name, max_tokens=2))
    assert [s.error for s in sequences] == [None] * 100
    # The first one has its own memory, and got what it asked for once.
    assert [s.logs for s in sequences] == ["name", *["namename"] * 99]


def test_a_fork_never_finds_what_another_has_left_in_its_memory(system: System) -> None:
    # The fork grows its memory, writes there, and ends; the next one gets the same memory.
    mid = f"""(if (call $seq_id) (then
      (if (i32.ne (memory.size) (i32.const 1)) (then unreachable))
      (if (i32.load (i32.const {FREE})) (then unreachable))
      (if (i32.ne (memory.grow (i32.const 1)) (i32.const 1)) (then unreachable))
      (i32.store (i32.const {FREE}) (i32.const 1))
      (if (i32.load (i32.const 65536)) (then unreachable))
      (i32.store (i32.const 65536) (i32.const 1))
      (return (i32.const 0))))"""
    name = system.upload(guest(pre=FORK_ONCE % 3, mid=mid))
    for _ in range(3):
        assert [s.error for s in system.run(name)] == [None] * 3


def test_a_module_that_begins_with_too_much_memory_is_refused(system: System) -> None:
    message = system.refusal(guest(pages=1025)).message
    assert message == (
        "the module's memory begins with 67174400 bytes; a controller may have 67108864"
    )


def test_a_table_ends_where_it_must(system: System) -> None:
    more = "(table $t 1 funcref) (type $f (func))"
    wasm = guest(
        more=more,
        init=until_refused("(table.grow $t (ref.null func) (i32.const 1000))")
        + "(global.set $kept (table.size $t))",
        mid="""(if (i32.or (i32.lt_u (global.get $kept) (i32.const 90000))
                          (i32.gt_u (global.get $kept) (i32.const 100000)))
                 (then unreachable))""",
        post="(call_indirect $t (type $f) (global.get $kept))",
    )
    assert system.controller_error(wasm).startswith("post_process: it reached outside a table")


def test_a_module_that_begins_with_a_large_table_is_refused(system: System) -> None:
    error = system.refusal(guest(more="(table 10000000 funcref)"))
    assert "10000000 elements" in error.message
    assert "100000" in error.message


def test_many_tables_are_refused(system: System) -> None:
    error = system.controller_error(guest(more="(table 100000 funcref)" * 90))
    assert error == "start: resource limit exceeded: table count too high at 90"


def test_ten_gigabytes_of_log_are_counted_and_64_kib_kept(system: System) -> None:
    size = 64 * 1024 * 1024
    wasm = guest(init=GROW, mid=times(160, call("log", 0, size)))
    name = system.upload(wasm)
    [sequence] = system.undisturbed(lambda: system.run(name))
    assert sequence.finish_reason == "length"
    dropped = 160 * size - 65536
    assert sequence.logs.count(f"\n[{dropped} more bytes of log were dropped]\n") == 5
    assert len(sequence.logs) < 5 * 70_000


def test_ten_gigabytes_through_wasi_are_counted_too(system: System) -> None:
    # 16 buffers of all its memory in each of 10 calls.
    size = 64 * 1024 * 1024
    pieces = f"""(local.set $i (i32.const 16)) (loop $again
      (i32.store (i32.add (i32.const {FREE}) (i32.mul (local.get $i) (i32.const 8)))
        (i32.const 0))
      (i32.store (i32.add (i32.const {FREE + 4}) (i32.mul (local.get $i) (i32.const 8)))
        (i32.const {size}))
      (br_if $again (local.tee $i (i32.sub (local.get $i) (i32.const 1)))))"""
    wasm = guest(
        imports=WASI["fd_write"],
        init=GROW + pieces,
        mid=times(10, f"(drop {call('fd_write', 1, FREE + 8, 16, FREE)})"),
    )
    name = system.upload(wasm)
    [sequence] = system.undisturbed(lambda: system.run(name))
    assert sequence.finish_reason == "length"
    assert f"[{160 * size - 65536} more bytes of log were dropped]" in sequence.logs


def test_a_log_in_small_pieces_runs_out_of_time(system: System) -> None:
    error = system.fails(guest(mid=f"(loop $ever {call('log', 512, 1)} (br $ever))"))
    assert error.code == "controller_timeout"


def test_the_log_of_a_whole_stream_is_bounded(system: System) -> None:
    wasm = guest(mid=call("log", 0, 65536))
    name = system.upload(wasm)
    [sequence] = system.undisturbed(lambda: system.run(name, max_tokens=100))
    assert len(sequence.tokens) == 100
    assert len(sequence.logs) < 2 * 1024 * 1024


# --- pointers -------------------------------------------------------------------------------------

WASI = {
    name: f'(import "wasi_snapshot_preview1" "{name}" (func ${name} (param {params}) (result i32)))'
    for name, params in {
        "fd_write": "i32 i32 i32 i32",
        "fd_fdstat_get": "i32 i32",
        "random_get": "i32 i32",
        "clock_time_get": "i32 i64 i32",
        "clock_res_get": "i32 i32",
        "args_sizes_get": "i32 i32",
        "environ_sizes_get": "i32 i32",
    }.items()
}
ADDRESSES = [65_534, 70_000_000, 2**32 - 1]
"""One that reaches over the end of a page, one that no guest has, the last one."""
POINTERS = {
    "log": ["log {} 4", "log 8 {}"],
    "fail": ["fail {} 4"],
    "tokenize": ["tokenize {} 4 8 4", "tokenize 512 {} 8 4", "tokenize 512 4 {} 4"],
    "trie_read": ["trie_read {} 0 4"],
    "var_get": ["var_get {} 4 8 8 0", "var_get 512 4 {} 8 0", "var_get 512 4 8 8 {}"],
    "var_set": [
        "var_set {} 4 8 8 -1 0",
        "var_set 512 4 {} 8 -1 0",
        "var_set 512 4 8 8 -1 {}",
    ],
    "var_append": [
        "var_append {} 4 8 8 -1 0",
        "var_append 512 4 {} 8 -1 0",
        "var_append 512 4 8 8 -1 {}",
    ],
    "fd_write": ["fd_write 1 {} 1 8", "fd_write 2 512 0 {}"],
    "fd_fdstat_get": ["fd_fdstat_get 1 {}"],
    "random_get": ["random_get {} 4", "random_get 8 {}"],
    "clock_res_get": ["clock_res_get 0 {}"],
    "args_sizes_get": ["args_sizes_get {} 8", "args_sizes_get 8 {}"],
    "environ_sizes_get": ["environ_sizes_get {} 8", "environ_sizes_get 8 {}"],
}
"""Calls of imports, with a place for an address, or for a size of as many bytes."""


def test_pointers_out_of_bounds_are_told_of_by_every_import(system: System) -> None:
    bodies = []
    for name, calls in POINTERS.items():
        for pattern in calls:
            for address in ADDRESSES:
                _, *arguments = pattern.format(address).split()
                made = call(name, *map(int, arguments))
                bodies.append(
                    (pattern, address, made if name in ("log", "fail") else f"(drop {made})")
                )
    clock = "(drop (call $clock_time_get (i32.const 0) (i64.const 0) (i32.const {})))"
    bodies += [("clock_time_get", a, clock.format(a)) for a in ADDRESSES]
    # The number of the call is the argument, two characters after the prompt in the inbox.
    chosen = f"""(local.set $i (i32.add (i32.const 2048) (i32.mul (i32.const 4)
      (i32.load (i32.const {COUNT})))))
      (local.set $j (i32.add (i32.sub (i32.load8_u (local.get $i)) (i32.const 48))
        (i32.mul (i32.const 64) (i32.sub (i32.load8_u offset=1 (local.get $i)) (i32.const 48)))))"""
    set_name = f"(drop {call('var_set', 512, 4, 8, 8, -1, 0)})"
    cases = "\n".join(
        f"(if (i32.eq (local.get $j) (i32.const {i})) (then {body}))"
        for i, (_, _, body) in enumerate(bodies)
    )
    name = system.upload(guest(imports="\n".join(WASI.values()), init=set_name + chosen + cases))

    def every() -> list[str]:
        errors = []
        for i in range(len(bodies)):
            with pytest.raises(ControllerError) as caught:
                system.run(name, controller_arg=chr(48 + i % 64) + chr(48 + i // 64))
            errors.append(caught.value.message)
        return errors

    for (pattern, address, _), error in zip(bodies, system.undisturbed(every), strict=True):
        assert error.startswith("init_prompt: "), pattern
        if "8 {}" not in pattern or address > 65_534:
            assert str(address) in error, (pattern, address, error)
        assert "its memory ends at 65536" in error or "at most" in error, (pattern, error)


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ({"abi": "(return (i32.const -4))"}, "64 bytes at address 4294967292"),
        ({"abi": "(return (i32.const 65500))"}, "64 bytes at address 65500"),
        (
            {"abi": "(return (i32.const 1026))"},
            "returned the address 1026, which is not aligned to 4",
        ),
        ({"abi": set_word(1028, 70_000_000)}, "bytes at address 70000000"),
        ({"init": set_word(1028, 70_000_000)}, "4 bytes at address 70000000"),
        ({"init": set_word(1028, 65_534)}, "4 bytes at address 65534"),
        ({"mid": set_word(MASK_AT, 65_500)}, "512 bytes at address 65500"),
        ({"mid": set_word(MASK_AT, 65_532)}, "512 bytes at address 65532"),
        ({"mid": set_word(MASK_AT, 2**32 - 4)}, "512 bytes at address 4294967292"),
        (
            {"pre": set_word(N, 1) + set_word(LIST, 65_534) + "(return (i32.const 4))"},
            "4 bytes at address 65534",
        ),
        (
            {"mid": set_word(N, 5) + set_word(LIST, 2**32 - 1) + "(return (i32.const 4))"},
            "20 bytes at address 4294967295",
        ),
        (
            {"pre": set_word(N, 2**32 - 1) + "(return (i32.const 4))"},
            "it appended 4294967295 tokens at once",
        ),
    ],
)
def test_pointers_out_of_bounds_in_the_call_block_are_told_of(
    system: System, calls: dict[str, str], says: str
) -> None:
    error = system.controller_error(guest(**calls))
    assert says in error
    assert "its memory ends at 65536" in error or "aligned" in error or "are allowed" in error


# --- masks ----------------------------------------------------------------------------------------


def test_a_mask_at_the_very_end_of_memory_is_a_mask(system: System) -> None:
    vocabulary = system.client.model_info().vocab_size
    at = 65_536 - 4 * -(-vocabulary // 32)
    name = system.upload(
        guest(mid=set_word(MASK_AT, at) + f"(i32.store (i32.const {at}) (i32.const 0x20))")
    )
    [sequence] = system.undisturbed(lambda: system.run(name))
    assert sequence.tokens == [5] * 5


def test_bits_beyond_the_vocabulary_mean_nothing(system: System) -> None:
    # All the ones that there are, the rest of the last word included.
    free = system.client.generate("x = 1", max_tokens=5, ignore_eos=True).tokens
    name = system.upload(guest(mid=set_word(MASK_AT, MASK)))
    [sequence] = system.undisturbed(lambda: system.run(name))
    assert sequence.tokens == free


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_empty_mask_is_told_of(system: System, temperature: float) -> None:
    error = system.controller_error(guest(mid=set_word(MASK_AT, FREE)), temperature=temperature)
    assert error == (
        "its controller allows no token that may come here; allow one at least, or stop"
    )


# --- what it decides ------------------------------------------------------------------------------


def splice(drop: int, *tokens: int) -> str:
    """Drops and appends."""
    stores = "".join(set_word(FREE + 4 * i, token) for i, token in enumerate(tokens))
    words = set_word(N, len(tokens)) + set_word(LIST, FREE) + set_word(DROP, drop)
    return f"{stores} {words} (return (i32.const 4))"


@pytest.mark.parametrize("drop", [5, 2**32 - 1])
def test_a_splice_before_the_beginning_is_told_of(system: System, drop: int) -> None:
    # In its third round, when there are 2 tokens.
    body = f"(if (i32.eq (global.get $round) (i32.const 3)) (then {splice(drop, 7)}))"
    assert system.controller_error(guest(mid=body)) == (
        f"its splice drops {drop} tokens; the sequence has 2 beyond its prompt"
    )


def test_a_splice_that_does_nothing_is_told_of(system: System) -> None:
    assert system.controller_error(guest(mid=splice(0))) == (
        "its splice neither drops nor appends tokens; a splice has to do one of them"
    )


@pytest.mark.parametrize("phase", ["pre", "mid"])
@pytest.mark.parametrize("token", [1_000_000, 2**32 - 1])
def test_a_token_outside_the_vocabulary_is_told_of(system: System, phase: str, token: int) -> None:
    last = system.client.model_info().vocab_size - 1
    assert system.controller_error(guest(**{phase: splice(0, 65, token)})) == (
        f"it appended token {token}; token ids of this model are 0 to {last}"
    )


@pytest.mark.parametrize(
    ("phase", "known"),
    [
        ("pre", "0 (stop), 1 (go on), 2 (suspend), 3 (fork), 4 (append)"),
        ("mid", "0 (stop), 1 (sample), 4 (splice)"),
        ("post", "0 (stop), 1 (go on)"),
    ],
)
def test_an_answer_that_does_not_exist_is_told_of(system: System, phase: str, known: str) -> None:
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
        "it appended tokens in 256 rounds without sampling; a controller has to sample, suspend or "
        "stop before that"
    )


@pytest.mark.parametrize(
    ("count", "says"),
    [
        (1_000_000, "it appended 1000000 tokens at once; at most 65536 are allowed"),
        (40_000, "it appended 80000 tokens without sampling; at most 65536 are allowed"),
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


# --- forks ----------------------------------------------------------------------------------------


def test_ten_thousand_forks_at_once_are_refused(system: System) -> None:
    assert system.controller_error(guest(pre=set_word(N, 10_000) + "(return (i32.const 3))")) == (
        "the fork of 9999 more sequences would make 10000 of this request; at most 128 are allowed"
    )


def test_a_fork_bomb_across_forks_is_refused(system: System) -> None:
    # Every sequence becomes two in each of its rounds.
    name = system.upload(guest(pre=set_word(N, 2) + "(return (i32.const 3))"))
    sequences = system.undisturbed(lambda: system.run(name, max_tokens=100))
    assert len(sequences) == 128
    assert {s.error for s in sequences} == {
        "the fork of 1 more sequences would make 129 of this request; at most 128 are allowed"
    }
    assert {s.code for s in sequences} == {"controller_failed"}


def test_sequences_that_wake_each_other_for_ever_are_stopped(system: System) -> None:
    fork = f"{set_word(N, 2)} (return (i32.const 3))"
    write = f"(drop {call('var_set', 512, 4, 8, 8, -1, 0)})"
    pre = f"""(if (i32.eq (global.get $round) (i32.const 1)) (then {fork}))
      (if (i32.gt_u (global.get $round) (i32.const 2)) (then {write} (return (i32.const 2))))"""
    name = system.upload(guest(pre=pre))
    sequences = system.undisturbed(lambda: system.run(name, max_tokens=100))
    assert {s.error for s in sequences} <= {
        f"the sequences of the request woke each other {n} times and none of them sampled; a "
        "sequence that is woken has to sample or stop now and then"
        for n in (401, 402)
    }


def test_a_deadlock_is_told_of(system: System) -> None:
    error = system.fails(guest(pre="(return (i32.const 2))"))
    assert type(error) is ControllerError
    assert error.code == "deadlock"
    assert error.message == (
        "deadlock: every sequence of the request is suspended, so no variable will change and no "
        "fork will end"
    )


def test_a_deadlock_of_forks_is_told_of_by_each(system: System) -> None:
    fork = f"{set_word(N, 3)} (return (i32.const 3))"
    pre = f"""(if (i32.eq (global.get $round) (i32.const 1)) (then {fork}))
      (return (i32.const 2))"""
    name = system.upload(guest(pre=pre))
    sequences = system.undisturbed(lambda: system.run(name))
    assert [s.code for s in sequences] == ["deadlock"] * 3


# --- variables ------------------------------------------------------------------------------------


def test_one_value_of_a_gigabyte_cannot_be_had(system: System) -> None:
    wasm = guest(init=GROW, mid=f"(drop {call('var_set', 512, 4, 0, 64 * 1024 * 1024, -1, 0)})")
    assert system.controller_error(wasm) == (
        "mid_process: the variable's value has 67108864 bytes; at most 1048576 are allowed"
    )


def test_a_gigabyte_by_appending_is_refused(system: System) -> None:
    append = times(1024, f"(drop {call('var_append', 512, 4, 0, 1048576, -1, 0)})")
    assert system.controller_error(guest(pages=32, init=append)) == (
        "init_prompt: it wrote 1048576 bytes to variables in one round; at most 131072 are allowed"
    )


def test_a_gigabyte_round_by_round_is_refused(system: System) -> None:
    wasm = guest(pages=32, mid=f"(drop {call('var_set', 512, 4, 0, 131072, -1, 0)})")
    assert system.controller_error(wasm, max_tokens=1024) == (
        "mid_process: the request wrote 16908288 bytes to variables in all; at most 16777216 are "
        "allowed"
    )


def test_a_gigabyte_in_many_values_is_refused(system: System) -> None:
    # Names of two bytes that count up, a few in each round.
    body = f"""(global.set $kept (i32.add (global.get $kept) (i32.const 1)))
      (i32.store16 (i32.const 512) (i32.or (i32.const 0x4040) (i32.or
        (i32.and (global.get $kept) (i32.const 31))
        (i32.shl (i32.shr_u (global.get $kept) (i32.const 5)) (i32.const 8)))))
      (drop {call("var_set", 512, 2, 0, 32768, -1, 0)})"""
    error = system.controller_error(guest(mid=times(4, body)), max_tokens=1024)
    assert error.startswith("mid_process: 32768 bytes for '")
    assert "at most 8388608 are allowed" in error


def test_no_request_reads_the_variables_of_another(system: System) -> None:
    keeps = system.upload(guest(init=f"(drop {call('var_set', 512, 4, 520, 6, -1, 0)})"))
    reads = system.upload(
        guest(
            init=f"(local.set $i {call('var_get', 512, 4, FREE, 64, FREE + 64)})"
            "(if (i32.ne (local.get $i) (i32.const -1)) (then unreachable))"
            f"(if (i32.load (i32.const {FREE + 64})) (then unreachable))"
            f"(if (i32.load (i32.const {FREE})) (then unreachable))"
        )
    )
    own = system.upload(
        guest(
            init=f"(drop {call('var_set', 512, 4, 520, 6, -1, 0)})"
            f"(local.set $i {call('var_get', 512, 4, FREE, 64, 0)})"
            f"(call $log (i32.const {FREE}) (local.get $i))"
        )
    )
    assert system.run(own)[0].logs == "secret"

    def act() -> str | None:
        with system.client.generate("x", controller=keeps, max_tokens=400, ignore_eos=True) as one:
            next(iter(one))
            with system.bus.client() as other:
                seen = other.generate("x", controller=reads, max_tokens=2, ignore_eos=True)
                return seen.wait()[0].error or system.run(reads)[0].error

    assert system.undisturbed(act) is None


@pytest.mark.parametrize("name", ["var_get", "var_set", "var_append"])
def test_a_name_that_is_no_utf8_is_told_of(system: System, name: str) -> None:
    rest = (8, 8, 0) if name == "var_get" else (8, 8, -1, 0)
    error = system.controller_error(guest(mid=f"(drop {call(name, 528, 3, *rest)})"))
    assert error.startswith("mid_process: the variable name is not UTF-8: ")
    assert "0xff" in error


@pytest.mark.parametrize("size", [0, 257, 60_000])
def test_a_name_of_a_wrong_length_is_told_of(system: System, size: int) -> None:
    assert system.controller_error(guest(mid=f"(drop {call('var_get', 0, size, 8, 8, 0)})")) == (
        f"mid_process: the variable name has {size} bytes of UTF-8; a name has 1 to 256"
    )


# --- modules --------------------------------------------------------------------------------------


def test_a_module_of_50_mb_is_refused(system: System) -> None:
    """By the client already; the broker does it where the client does not (its own test)."""
    wasm = guest() + b"\0" + b"\xf8\xf0\xea\x17" + bytes(50_000_000 - 8)

    def act() -> RequestError:
        with pytest.raises(RequestError) as caught:
            system.client.upload_controller(wasm)
        return caught.value

    error = system.undisturbed(act)
    assert (error.code, error.path) == ("too_large", "$.data")
    assert error.message == f"the module has {len(wasm)} bytes; the limit is 16777216"


REFUSED = {
    "the import tokenbus.open is unknown; tokenbus has log, fail, seq_id": guest(
        imports='(import "tokenbus" "open" (func (param i32)))'
    ),
    "the import env.system is unknown; there are tokenbus and wasi_snapshot_preview1": guest(
        imports='(import "env" "system" (func (param i32) (result i32)))'
    ),
    "the import env.count is a global; only functions can be had": guest(
        imports='(import "env" "count" (global i32))'
    ),
    "the import tokenbus.log is (i64) -> (); it would have to be (i32, i32) -> ()": guest(
        imports='(import "tokenbus" "log" (func (param i64)))'
    ),
    "the module is for version 2 of the native ABI (it exports tokenbus_abi_v2); this worker "
    "speaks version 1": guest().replace(b"tokenbus_abi_v1", b"tokenbus_abi_v2"),
    "not Wasm": b"#!/bin/sh\nrm -rf /\n",
    "this is not Wasm: it is empty": b"",
    "137 are there": guest()[:-20],
    "the module is no controller: ": b"\0asm\1\0\0\0",
}
"""What the error says, and the module."""


def test_what_is_no_controller_is_refused(system: System) -> None:
    def every() -> dict[str, RequestError]:
        errors = {}
        for says, wasm in REFUSED.items():
            with pytest.raises(RequestError) as caught:
                system.client.upload_controller(wasm)
            errors[says] = caught.value
        return errors

    for says, error in system.undisturbed(every).items():
        assert (type(error), error.code, error.path) == (RequestError, "invalid_field", "$.data")
        assert says in error.message


# --- AICI -----------------------------------------------------------------------------------------


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
        assert "right would be" in error


# --- many at once ---------------------------------------------------------------------------------


def test_twenty_hostile_requests_at_once_hold_nobody_up(system: System) -> None:
    """What they take of the machine, they take; but the stream receives tokens meanwhile."""
    names = [system.upload(guest(**calls)) for calls, _ in LOOPS.values() if "grow" not in calls]
    ended: list[str] = []
    during: list[int] = []

    def one(name: str) -> None:
        with pytest.raises(ControllerError) as caught:
            system.run(name)
        ended.append(caught.value.code)

    def all_of_them() -> None:
        threads = [threading.Thread(target=one, args=(names[i % len(names)],)) for i in range(20)]
        before = system.neighbour.received
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        during.append(system.neighbour.received - before)

    system.undisturbed(all_of_them)
    assert ended == ["controller_timeout"] * 20
    # They take seconds of CPU time; a stream that waited for them would have one step or two.
    assert during[0] > 5
