"""Measures the cost of controllers: calls, rounds, forks, starts, variables, masks and biases.

The guests in ``benchmarks/guests`` are C files that this program compiles. A measured system has a
broker, a GPU worker, a controller worker and a state worker in separate processes.

Times differ between machines. So the most important times are also divided by the time of a *bare
operation* in the same run. There are three bare operations:

- A bare call is ``wasmtime_func_call_unchecked`` of a function that returns a constant.
  ``host_call_vs_bare_call`` is ``host_us_per_call`` divided by the time of a bare call.
  ``aici_round_vs_bare_calls`` is ``aici_us_per_round`` divided by the time of three bare calls.
- A bare instantiation creates only a store and an instance of the measured module.
  ``clone_us``, ``clone_us_first`` and ``start_us`` are divided by the time of a bare instantiation.
  The results are ``clone_vs_instantiate``, ``clone_first_vs_instantiate`` and
  ``start_vs_instantiate``.
- A bare round trip goes from one process to another and back, through two ROUTER sockets of a third
  process (``_round_trip.py``). ``var_op_us_p50``, ``wait_us_p50_10`` and ``wait_us_p50_40`` are
  divided by the time of a bare round trip. The results are ``var_op_vs_round_trip``,
  ``wait_10_vs_round_trip`` and ``wait_40_vs_round_trip``. ``wait_us_p50_N`` is the time that a
  batch of N sequences waits for its masks after its forward has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import wasmtime
from _models import VOCAB, llama_folder
from _report import arguments, report
from _round_trip import round_trip_us
from tokenbus.clients import Client, TokenbusError
from tokenbus.protocol.bodies import decode_as
from tokenbus.protocol.messages import PROTOCOL_VERSION
from tokenbus.protocol.worker_messages import Register, Registered
from tokenbus.workers.bus import Bus, FromBus
from tokenbus.workers.controller.host import Host
from tokenbus.workers.controller.interface import Controller
from tokenbus.workers.controller.limits import Limits
from tokenbus.workers.controller.logs import Log
from tokenbus.workers.controller.request_variables import RequestVariables
from tokenbus.workers.controller.tokens.vocabulary import TokenizerVocabulary
from tokenbus.workers.controller.variable_calls import SequenceVariables, VariableCalls
from tokenbus.workers.controller.wasm.aici import AiciProgram
from tokenbus.workers.controller.wasm.instance import SPARES
from tokenbus.workers.controller.wasm.native import NativeProgram
from tokenbus.workers.controller.wasm.sandbox import make_engine
from wasmtime import _ffi as ffi

GUESTS = Path(__file__).parent / "guests"
FORWARD_S = 0.025
LARGE_VOCAB = 131_072
LIMITS = Limits()
MICRO = 1e6


def compiled(name: str, folder: Path, *definitions: str) -> bytes:
    """Compiles a guest of ``benchmarks/guests`` to Wasm. ``definitions`` are compiler flags."""
    out = folder / f"{name}.wasm"
    flags = [*definitions, "-target", "wasm32-freestanding", "-O3", "-nostdlib", "-Wl,--no-entry"]
    command = [sys.executable, "-m", "ziglang", "cc", *flags, "-o", str(out)]
    subprocess.check_call([*command, str(GUESTS / f"{name}.c")])
    return out.read_bytes()


def best_us(work: Callable[[], object], times: int, runs: int = 7) -> float:
    """Microseconds of one call of ``work``. Each of ``runs`` runs takes the mean of ``times``
    calls. The result is the minimum over the runs."""
    for _ in range(times // 10 + 1):
        work()
    best = float("inf")
    for _ in range(runs):
        began = time.perf_counter()
        for _ in range(times):
            work()
        best = min(best, (time.perf_counter() - began) / times)
    return best * MICRO


# --- the sandbox in this process ------------------------------------------------------------------


class Sandbox:
    """Runs guests with a vocabulary of 131,072 tokens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engine = make_engine(LIMITS)
        tokens = [i.to_bytes(3, "big") for i in range(131_072)]
        self._vocabulary = TokenizerVocabulary.from_tokens(tokens, eos=[0], fingerprint="benchmark")

    def program(self, name: str) -> NativeProgram | AiciProgram:
        """The compiled program of a guest."""
        module = wasmtime.Module(self._engine, compiled(name, self._folder))
        kind = AiciProgram if name == "aici" else NativeProgram
        return kind(self._engine, module)

    def host(self, seq: int = 0, variables: Any = None) -> Host:
        """The environment of a guest's sequence."""
        log = Log(LIMITS.log_bytes)
        return Host(1, seq, b"", self._vocabulary, variables, log, LIMITS, 100)

    def costs(self) -> dict[str, float]:
        """Measures a call, an AICI round, a start and a fork. Returns each time, and this time
        divided by the time of its bare operation."""
        program = self.program("empty")
        controller = program.start(self.host())
        controller.init_prompt([1, 2, 3])
        mask = memoryview(bytearray(131_072 // 8))
        calls = [
            best_us(controller.pre_process, 20_000),
            best_us(lambda: controller.mid_process([0], mask), 20_000),
            best_us(lambda: controller.post_process([5], 0), 20_000),
        ]
        aici = self.program("aici").start(self.host())
        aici.init_prompt([1, 2, 3])
        small = self.program("all_allowed")

        def round_of_aici() -> None:
            aici.post_process([5], 0)
            aici.pre_process()
            aici.mid_process([0], mask)

        def fork() -> Controller:
            return controller.fork(self.host(1))

        def start() -> Controller:
            started = small.start(self.host())
            started.init_prompt([1, 2, 3])
            started.pre_process()
            started.mid_process([0], mask)
            return started

        bare_call = best_us(_bare_call(self._engine), 20_000)
        per_call, per_round = statistics.mean(calls), best_us(round_of_aici, 2_000)
        clone = _without_close(fork, together=8)
        clone_first = _without_close(fork, after=_free_spares)
        started = _without_close(start)
        forked = self.bare_instantiation_us("empty")
        small_one = self.bare_instantiation_us("all_allowed")
        return {
            "host_us_per_call": per_call,
            "host_call_vs_bare_call": per_call / bare_call,
            "aici_us_per_round": per_round,
            "aici_round_vs_bare_calls": per_round / (3 * bare_call),
            "clone_us": clone,
            "clone_vs_instantiate": clone / forked,
            "clone_us_first": clone_first,
            "clone_first_vs_instantiate": clone_first / forked,
            "start_us": started,
            "start_vs_instantiate": started / small_one,
        }

    def bare_instantiation_us(self, name: str) -> float:
        """The median time of a bare instantiation of a guest, in microseconds. The guest's imports
        are linked before."""
        module = self.program(name)._template.made
        times = []
        for _ in range(400):
            began = time.perf_counter()
            store = wasmtime.Store(self._engine)
            store.set_epoch_deadline(_NO_DEADLINE)
            module.instantiate(store)
            times.append(time.perf_counter() - began)
            store.close()
        return statistics.median(times) * MICRO


_NO_DEADLINE = 1 << 40


def _bare_call(engine: wasmtime.Engine) -> Callable[[], object]:
    """Returns a function that makes a bare call."""
    store = wasmtime.Store(engine)
    store.set_epoch_deadline(_NO_DEADLINE)
    text = '(module (func (export "f") (result i32) (i32.const 1)))'
    instance = wasmtime.Instance(store, wasmtime.Module(engine, text), [])
    function = instance.exports(store)["f"]
    assert isinstance(function, wasmtime.Func)
    call = ctypes.CDLL(str(ffi.filename)).wasmtime_func_call_unchecked
    call.restype = ctypes.c_void_p
    trap = ctypes.POINTER(ffi.wasm_trap_t)()
    arguments = (
        store._context(),
        ctypes.byref(function._func),
        (ffi.wasmtime_val_raw_t * 1)(),
        ctypes.c_size_t(1),
        ctypes.byref(trap),
    )

    def one(_kept: object = (store, instance, trap)) -> object:
        return call(*arguments)

    return one


def _free_spares() -> None:
    """Frees the memory of ended forks, so that later forks cannot reuse it."""
    for kept in SPARES._kept:
        kept.free()
    SPARES._kept.clear()
    SPARES._bytes = 0


def _without_close(
    make: Callable[[], Controller], together: int = 1, after: Callable[[], None] = lambda: None
) -> float:
    """The median time to create a controller, in microseconds. ``together`` controllers are created
    one after another and then closed. This is repeated 400 times. Closing is not measured.
    ``after`` is called each time the controllers have been closed."""
    times = []
    for _ in range(400):
        made = []
        for _ in range(together):
            began = time.perf_counter()
            made.append(make())
            times.append(time.perf_counter() - began)
        for controller in made:
            controller.close()
        after()
    return statistics.median(times) * MICRO


# --- the system -----------------------------------------------------------------------------------


class System:
    """The processes of a system: a broker, a state worker, controller workers and GPU workers. The
    sockets and the log are in ``folder``."""

    def __init__(
        self, folder: Path, gpu: list[str], model: Path, gpus: int = 1, controllers: int = 1
    ) -> None:
        self.front = f"ipc://{folder}/front.sock"
        self.back = f"ipc://{folder}/back.sock"
        own = {k: v for k, v in os.environ.items() if not k.startswith("TOKENBUS_")}
        settings = {"FRONT": self.front, "RUN_DIR": str(folder), "MODEL": str(model)}
        self._environment = own | {f"TOKENBUS_{k}": v for k, v in settings.items()}
        self._log = (folder / "log").open("w")
        module = "tokenbus.workers"
        self._processes = [
            self._started(["-m", "tokenbus.broker"]),
            self._started(["-m", f"{module}.state"]),
            *(self._started(["-m", f"{module}.controller"]) for _ in range(controllers)),
            *(self._started(gpu) for _ in range(gpus)),
        ]
        self._expected = sorted(["state", *["controller"] * controllers, *["gpu"] * gpus])
        self.client = Client(self.front)
        self._wait()

    def _started(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self._environment,
            stdout=self._log,
            stderr=self._log,
        )

    def _wait(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with contextlib.suppress(TokenbusError):
                workers = self.client.status(timeout_s=2).workers
                roles = sorted(w.role for w in workers if w.role != "gpu" or w.models)
                if roles == self._expected:
                    return
            time.sleep(0.1)
        raise SystemExit(f"the system did not start; see {self._log.name}")

    def close(self) -> None:
        """Ends the workers, then the broker."""
        self.client.close()
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        self._log.close()


@contextlib.contextmanager
def system(gpu: list[str], model: Path, gpus: int = 1, controllers: int = 1) -> Iterator[System]:
    """Runs a system in a new folder."""
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        running = System(Path(folder), gpu, model, gpus, controllers)
        try:
            yield running
        finally:
            running.close()


def tokens_per_s(client: Client, streams: int, new: int, controller: str | None) -> float:
    """Tokens per second of all streams together. The clock starts when each stream has its first
    token."""
    options: dict[str, Any] = {"max_tokens": new, "ignore_eos": True, "timeout_s": 300}
    if controller is not None:
        options["controller"] = controller
    begun = [client.generate([7 + i, 8, 9], **options) for i in range(streams)]
    iterators = [iter(stream) for stream in begun]
    for iterator in iterators:
        next(iterator)
    began = time.perf_counter()
    for iterator in iterators:
        for _ in iterator:
            pass
    return streams * (new - 1) / (time.perf_counter() - began)


def waits(folder: Path, model: Path, new: int) -> dict[str, float]:
    """Measures the time that a batch waits for masks. Also measures tokens per second with masks,
    divided by tokens per second without masks. In place of the forward, the GPU worker sleeps, so
    the CPU is free."""
    out = folder / "waits.json"
    gpu = [str(Path(__file__).parent / "_standin_gpu.py"), str(FORWARD_S), str(out)]
    with system(gpu, model) as running:
        running.client.upload_controller(compiled("all_allowed", folder), tag="all")
        free, steered = [], []
        for _ in range(3):
            free.append(tokens_per_s(running.client, 32, new, None))
            steered.append(tokens_per_s(running.client, 32, new, "all"))
        for streams in (10, 40):
            tokens_per_s(running.client, streams, new, "all")
    seen: list[tuple[int, float]] = json.loads(out.read_text())
    results = {}
    for streams in (10, 40):
        mine = [seconds for ready, seconds in seen if ready == streams]
        results[f"wait_us_p50_{streams}"] = statistics.median(mine) * MICRO
    results["constrained_vs_free"] = max(steered) / max(free)
    return results


def constrained(folder: Path, model: Path, new: int, runs: int) -> float:
    """Tokens per second of a batch of 32 with masks, divided by tokens per second without masks.
    The forward runs on the CPU."""
    with system(["-m", "tokenbus.workers.gpu"], model) as running:
        running.client.upload_controller(compiled("all_allowed", folder), tag="all")
        free, steered = [], []
        for _ in range(runs):
            free.append(tokens_per_s(running.client, 32, new, None))
            steered.append(tokens_per_s(running.client, 32, new, "all"))
    return max(steered) / max(free)


def biased(folder: Path, model: Path, new: int) -> dict[str, float]:
    """Tokens per second of a batch of 32 with biases, divided by tokens per second without biases.
    In place of the forward, the GPU worker sleeps, so the CPU is free."""
    out = folder / "biased.json"
    gpu = [str(Path(__file__).parent / "_standin_gpu.py"), str(FORWARD_S), str(out)]
    rates: dict[str | None, list[float]] = {None: [], "sparse_bias": [], "dense_bias": []}
    with system(gpu, model) as running:
        for tag, num_pairs in (("sparse_bias", 100), ("dense_bias", 0)):
            module = compiled("bias", folder, f"-DNUM_PAIRS={num_pairs}")
            running.client.upload_controller(module, tag=tag)
        for _ in range(3):
            for name, found in rates.items():
                found.append(tokens_per_s(running.client, 32, new, name))
    free = max(rates.pop(None))
    return {f"constrained_vs_free_{name}": max(found) / free for name, found in rates.items()}


class StateWorker:
    """Sends the operations of one request to the state worker. Implements
    ``request_variables.StateWorker``."""

    def __init__(self, bus: Bus, calls: VariableCalls) -> None:
        self.perform = calls.perform
        self.send = calls.send
        self.flush = bus.flush


def variable_us(sandbox: Sandbox, model: Path) -> tuple[float, float]:
    """Two median times of a guest's operation on a variable, in microseconds. For the first time,
    the operation goes through the broker to the state worker and back. For the second time, the
    controller worker answers it from a copy of the variables."""
    with system(["-m", "tokenbus.workers.gpu"], model) as running:

        def registration() -> Register:
            return Register(
                name="benchmark",
                role="controller",
                version=PROTOCOL_VERSION,
                pid=os.getpid(),
                host="here",
                capacity=1,
                patterns=["nothing"],
            )

        def first(messages: list[FromBus]) -> list[FromBus]:
            for message in messages:
                if message.type == b"VARIABLE_ANSWER":
                    calls.on_answer(message.body)
                elif message.type == b"REGISTERED":
                    bus.registered(decode_as(Registered, message.body, "msgpack"))
            return []

        bus = Bus(running.back, registration, lambda: (0, {}), first)
        calls = VariableCalls(bus.post, lambda frames, link: bus.post(frames, link, False))
        bus.start()
        variables = SequenceVariables(1, 0, calls.perform, lambda: None)
        controller = sandbox.program("reads_variable").start(sandbox.host(0, variables))
        times = []
        for _ in range(2_000):
            began = time.perf_counter()
            controller.pre_process()
            times.append(time.perf_counter() - began)
        ordered = RequestVariables(StateWorker(bus, calls))
        copied = SequenceVariables(2, 0, ordered.perform, lambda: None)
        controller = sandbox.program("reads_variable").start(sandbox.host(0, copied))
        controller.pre_process()  # The first operation waits for the state worker.
        ahead = []
        for _ in range(100):
            for _ in range(10):
                began = time.perf_counter()
                controller.pre_process()
                ahead.append(time.perf_counter() - began)
            confirmed = threading.Event()
            ordered.when_confirmed(confirmed.set)
            ordered.flush()
            confirmed.wait()
        bus.close("the benchmark has ended")
    return statistics.median(times) * MICRO, statistics.median(ahead) * MICRO


NOTES = {
    "host_us_per_call": "microseconds of a call to an empty guest of the native ABI; at most 6",
    "host_call_vs_bare_call": "host_us_per_call divided by the time of a bare Wasmtime call",
    "aici_us_per_round": "microseconds of an AICI round: three calls and a mask; at most 150",
    "aici_round_vs_bare_calls": "aici_us_per_round divided by the time of three bare Wasmtime "
    "calls",
    "clone_us": "microseconds of a fork of a guest with 1 MiB of memory; at most 150",
    "clone_vs_instantiate": "clone_us divided by the time of a bare instantiation",
    "clone_us_first": "microseconds of a fork that cannot reuse the memory of an ended fork",
    "clone_first_vs_instantiate": "clone_us_first divided by the time of a bare instantiation",
    "start_us": "microseconds to start a sequence of a loaded module and to run its first round; "
    "at most 500",
    "start_vs_instantiate": "start_us divided by the time of a bare instantiation",
    "round_trip_us_p50": "microseconds of a bare round trip through two ROUTER sockets, median",
    "var_op_us_p50": "microseconds of a variable operation from guest to state worker and back, "
    "median; at most 600",
    "var_op_vs_round_trip": "var_op_us_p50 divided by the time of a bare round trip",
    "var_copy_us_p50": "microseconds of a variable operation that the controller worker answers "
    "from its copy, median",
    "wait_us_p50_10": "microseconds that a batch of 10 waits for masks after a forward of 25 ms, "
    "median; at most 300",
    "wait_10_vs_round_trip": "wait_us_p50_10 divided by the time of a bare round trip",
    "wait_us_p50_40": "microseconds that a batch of 40 waits for masks after a forward of 25 ms, "
    "median; at most 700",
    "wait_40_vs_round_trip": "wait_us_p50_40 divided by the time of a bare round trip",
    "constrained_vs_free": "tokens/s with masks, divided by tokens/s without masks; batch of 32, "
    f"vocabulary of {VOCAB:,} tokens, simulated forward; at least 0.95",
    "constrained_vs_free_sparse_bias": "tokens/s with a bias of 100 tokens, divided by tokens/s "
    f"without a bias; batch of 32, vocabulary of {LARGE_VOCAB:,} tokens, simulated forward; at "
    "least 0.97",
    "constrained_vs_free_dense_bias": "constrained_vs_free_sparse_bias with a bias of all "
    "tokens; at least 0.90",
    "constrained_vs_free_cpu": "constrained_vs_free with a forward that runs on the CPU",
}


def main() -> None:
    """Runs all measurements and reports the figures."""
    options = arguments(__doc__)
    new, runs = (60, 2) if options.quick else (200, 4)
    with tempfile.TemporaryDirectory(prefix="tb-bench-") as name:
        folder = Path(name)
        model = llama_folder(folder / "model")
        sandbox = Sandbox(folder)
        results = sandbox.costs()
        results["var_op_us_p50"], results["var_copy_us_p50"] = variable_us(sandbox, model)
        results["round_trip_us_p50"] = trip = round_trip_us(folder)
        results["var_op_vs_round_trip"] = results["var_op_us_p50"] / trip
        results |= waits(folder, model, 60)
        for streams in (10, 40):
            results[f"wait_{streams}_vs_round_trip"] = results[f"wait_us_p50_{streams}"] / trip
        large = llama_folder(folder / "large", vocab_size=LARGE_VOCAB)
        results |= biased(folder, large, 60)
        results["constrained_vs_free_cpu"] = constrained(folder, model, new, runs)
    report({name: results[name] for name in NOTES}, NOTES, options.json)


if __name__ == "__main__":
    main()
