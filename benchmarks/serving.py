"""Compares a system's tokens per second with its forward, its engine and llama.cpp's server.

- ``served_vs_forward_*``: ratio to the ideal rate, at which each step takes only the time of the
  forward. The forward is a sleep (``_standin_gpu.py``), so that the CPU is free. The client only
  counts tokens, except in ``…_python``, where it is our ``AsyncClient``. The measurement begins
  when a tenth of the tokens has arrived and ends when eight tenths have arrived.
- ``served_vs_engine_*``: tokens per second of our ``AsyncClient`` on the bus, divided by the tokens
  per second of the same engine without a bus. The model is a Llama with 21 million parameters, and
  prompts have 32 tokens. A run has one stream of 192 tokens or 32 streams of 64 tokens.
- ``vs_llamacpp_*``: ratio to llama.cpp's server for the same requests. Like our worker, this server
  samples greedily and computes in float32. The server's streams are read over HTTP. The figures are
  missing without the server, which ``make bench-peers`` builds.
- ``slowest_second_vs_median``: number of tokens in the slowest second, divided by the number in the
  median second. For a minute, streams of 1,000 tokens run one after another.

In a round, all loads run one after another. A ratio compares two loads of one round. A figure is
the median of the ratios of all rounds. All processes share the machine, and processes that are not
measured are idle. Speculation is off; ``speculation.py`` measures it.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from _llamacpp import HOW, SERVER, LlamaServer
from _models import VOCAB, llama_folder
from _report import report
from _served import HERE, Loader, System

ROUNDS = 5
SHORT = 0.15
"""The size of a warm-up run and of a run with ``--quick``, as a fraction of a normal run."""
MINUTE_S = 60.0
SETTINGS = {"speculation": "off"}
TEXT = {"text": True}
REGEX = {"controller": "regex", "controller_arg": r"([a-z]{1,8} )*"}


class Load(NamedTuple):
    """A run of ``streams`` streams with ``tokens`` tokens each, on one system and with one
    client."""

    system: str
    client: str
    streams: int
    tokens: int
    prompt: int = 8
    options: dict[str, Any] = {}
    rate: str = "middle"
    """The rate in the client's answer that figures use: ``whole`` or ``middle``
    (``_serving_client.py``)."""


LOADS = {
    "forward_1": Load("standin_5ms", "count", 1, 500),
    "forward_64": Load("standin_5ms", "count", 64, 500),
    "forward_256": Load("standin_5ms", "count", 256, 400),
    "forward_64_regex": Load("standin_5ms", "count", 64, 500, options=REGEX),
    "forward_64_text": Load("standin_5ms", "count", 64, 500, options=TEXT),
    "forward_256_text": Load("standin_5ms", "count", 256, 400, options=TEXT),
    "forward_64_python": Load("standin_5ms", "python", 64, 500),
    "forward_64_2ms": Load("standin_2ms", "count", 64, 1_000),
    "bus_1": Load("model", "python", 1, 192, 32, rate="whole"),
    "engine_1": Load("model", "engine", 1, 192, 32, rate="whole"),
    "llamacpp_1": Load("llamacpp", "llamacpp", 1, 192, 32, rate="whole"),
    "bus_32": Load("model", "python", 32, 64, 32, rate="whole"),
    "engine_32": Load("model", "engine", 32, 64, 32, rate="whole"),
    "llamacpp_32": Load("llamacpp", "llamacpp", 32, 64, 32, rate="whole"),
}
FORWARDS = {"standin_5ms": 0.005, "standin_2ms": 0.002}
"""Seconds of the simulated forward of each system."""


class Figure(NamedTuple):
    """A ratio of tokens per second: ``load`` to ``over``. If ``over`` is empty, ``load`` is
    compared with the ideal rate, at which each step takes only its forward's time."""

    load: str
    over: str
    note: str


FIGURES = {
    "served_vs_forward_1": Figure("forward_1", "", "1 stream, forward of 5 ms; at least 0.95"),
    "served_vs_forward_64": Figure("forward_64", "", "64 streams; at least 0.95"),
    "served_vs_forward_256": Figure("forward_256", "", "256 streams; at least 0.80"),
    "served_vs_forward_64_regex": Figure(
        "forward_64_regex", "", "64 streams under a regex; at least 0.90"
    ),
    "served_vs_forward_64_text": Figure("forward_64_text", "", "64 streams in text mode"),
    "served_vs_forward_256_text": Figure("forward_256_text", "", "256 streams in text mode"),
    "served_vs_forward_64_python": Figure(
        "forward_64_python", "", "64 streams to our AsyncClient; at least 0.90"
    ),
    "served_vs_forward_64_2ms": Figure(
        "forward_64_2ms", "", "64 streams, forward of 2 ms; at least 0.80"
    ),
    "served_vs_engine_1": Figure(
        "bus_1", "engine_1", "ratio of the bus to the engine, 1 stream; at least 0.85"
    ),
    "served_vs_engine_32": Figure("bus_32", "engine_32", "32 streams; at least 0.85"),
    "vs_llamacpp_1": Figure(
        "bus_1", "llamacpp_1", "ratio to llama.cpp's server, 1 stream; at least 0.6"
    ),
    "vs_llamacpp_32": Figure("bus_32", "llamacpp_32", "32 streams; at least 1.2"),
}
MINUTE = "slowest_second_vs_median"
NOTES = {
    **{name: figure.note for name, figure in FIGURES.items()},
    MINUTE: "ratio of the slowest second to the median, one stream; at least 0.6",
    **{f"{name}_tokens_per_s": "" for name in LOADS},
}


class Runs(Protocol):
    """The interface of a ``Loader``."""

    def run(self, **order: Any) -> dict[str, Any]: ...


class Systems:
    """The systems and clients that the chosen loads need, by their names in ``LOADS``."""

    def __init__(self, stack: ExitStack, folder: Path, needed: set[tuple[str, str]]) -> None:
        self._stack = stack
        self._folder = folder
        self._model = llama_folder(folder / "llama", eos=False)
        systems = {name for name, client in needed if client != "engine"}
        started = {name: stack.enter_context(self._system(name)) for name in sorted(systems)}
        for system in started.values():
            system.wait()
        self._clients: dict[tuple[str, str], Runs] = {}
        for name, client in sorted(needed):
            self._clients[name, client] = self._client(started.get(name), client)

    def _system(self, name: str) -> System | LlamaServer:
        folder = self._folder / name
        if name == "llamacpp":
            return LlamaServer(folder, self._model)
        if name == "model":
            return System(folder, self._model, **SETTINGS)
        standin = [str(HERE / "_standin_gpu.py"), str(FORWARDS[name]), str(folder / "waits")]
        return System(folder, self._model, standin, steered=True, **SETTINGS)

    def _client(self, system: System | LlamaServer | None, client: str) -> Loader:
        script, address = "_serving_client.py", [str(self._model)]
        if isinstance(system, LlamaServer):
            address = [client, system.address, str(self._model)]
        elif client != "engine":
            assert system is not None
            address = [client, system.front, str(self._model)]
        else:
            script = "_serving_engine.py"
        return self._stack.enter_context(Loader(script, *address, **SETTINGS))

    def run(self, name: str, number: int, part: float) -> dict[str, float]:
        """Runs a load in the round ``number``. ``part`` scales its tokens."""
        load = LOADS[name]
        return self._clients[load.system, load.client].run(
            # Each load of each round has new prompts, which no cache contains.
            prompts=prompts(random.Random(f"{name} {number}"), load.streams, load.prompt),
            tokens=max(10, int(load.tokens * part)),
            options=load.options,
        )

    def slowest_second(self, seconds: float) -> float:
        """Ratio of the tokens of the slowest second to the tokens of the median second. Streams run
        one after another for ``seconds``."""
        found = self._clients["model", "python"].run(
            prompts=prompts(random.Random(0), 100, 32), tokens=1_000, seconds=seconds
        )
        counts = found["per_second"]
        return float(min(counts) / statistics.median(counts))


def prompts(chosen: random.Random, count: int, length: int) -> list[list[int]]:
    """``count`` random prompts of ``length`` tokens."""
    return [[chosen.randrange(300, VOCAB) for _ in range(length)] for _ in range(count)]


def ratio(figure: Figure, ours: dict[str, float], over: dict[str, float] | None) -> float:
    """A figure, from the results of its loads in one round."""
    load = LOADS[figure.load]
    value = ours[load.rate]
    if over is None:
        return value * FORWARDS[load.system] / load.streams
    return value / over[LOADS[figure.over].rate]


def measure(names: list[str], quick: bool) -> dict[str, float]:
    """The figures with these names."""
    figures = {name: FIGURES[name] for name in names if name in FIGURES}
    used = {f.load for f in figures.values()} | {f.over for f in figures.values()}
    loads = [name for name in LOADS if name in used]
    needed = {LOADS[name][:2] for name in loads}
    if MINUTE in names:
        needed.add(("model", "python"))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
    results: dict[str, float] = {}
    part = SHORT if quick else 1.0
    with tempfile.TemporaryDirectory(prefix="tb-") as name, ExitStack() as stack:
        systems = Systems(stack, Path(name), needed)
        for load in loads:
            systems.run(load, -1, SHORT)
        for number in range(1 if quick else ROUNDS):
            for load, answers in found.items():
                answers.append(systems.run(load, number, part))
        if MINUTE in names:
            results[MINUTE] = systems.slowest_second(MINUTE_S * (0.1 if quick else 1.0))
    for name, figure in figures.items():
        pairs = zip(found[figure.load], found.get(figure.over, [None] * ROUNDS), strict=False)
        results[name] = statistics.median(ratio(figure, ours, over) for ours, over in pairs)
    for load, answers in found.items():
        per_s = [answer[LOADS[load].rate] for answer in answers]
        results[f"{load}_tokens_per_s"] = statistics.median(per_s)
    return {name: results[name] for name in NOTES if name in results}


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="run one short round")
    choices = [*FIGURES, MINUTE]
    parser.add_argument("--only", nargs="+", choices=choices, default=choices, metavar="NAME")
    options = parser.parse_args()
    # A signal becomes SystemExit, so that the started processes are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    names = options.only
    if not SERVER.exists() and any(name.startswith("vs_llamacpp") for name in names):
        print(HOW, file=sys.stderr)
        names = [name for name in names if not name.startswith("vs_llamacpp")]
    report(measure(names, options.quick), NOTES, options.json)


if __name__ == "__main__":
    main()
