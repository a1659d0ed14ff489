"""Compares programs on the bus with the same algorithms as clients of an HTTP server.

A *program* is a file of ``workers/controller/sdk`` and runs next to the model. A *client*
(``_programs_clients.py``) is the same algorithm in asyncio. For each text that the program
generates, the client sends a request to a server. A figure is a client's time divided by the
program's time:

- ``…_vs_sdk``: ``/v1/completions`` of the gateway through ``openai.AsyncOpenAI``, as most users
  write it. Prompts and answers are strings, and the gateway tokenizes each prompt.
- ``…_vs_client``: the same interface for a client that is written for speed. Requests and answers
  have token ids, so that no text is tokenized twice. The client writes HTTP itself.
- ``…_vs_llamacpp``: llama.cpp's server for a client that is written for speed. These figures are
  missing without the server, which ``make bench-peers`` builds.

The model is a Llama of 21 million parameters in float32, and all sides generate the same number of
tokens with the same temperature. Each run has a new prompt of 512 tokens. All clients share these
properties:

- Requests that do not depend on one another run at the same time, on connections that stay open.
- The server's prefix cache has the earlier tokens. An answer is one JSON object, not a stream.
- Log-probabilities come with the sampled tokens. Constraints are those of the server
  (``structured_outputs``, or ``grammar`` and ``json_schema``).
- The client calls the tools within its process. The program calls a tool worker.

``bestof8``: the best of 8 texts of 40 tokens. ``beam8``: 8 beams, 24 tokens. ``tree``: a tree of
thoughts with 3 levels; at each level, each kept thought gets 4 new thoughts of 16 tokens, and the 3
best are kept. ``mcts``: a Monte Carlo tree search with 32 lines of 16 tokens, 8 of them at a time.
``react``: five turns, each with a thought of 16 tokens, the choice of a tool, and the tool's
arguments as JSON. Runs of ``react`` in which the model answers before the fifth call are not
counted.

In a round, the program and the clients run one after another. A figure is the median of the ratios
of all rounds. ``tree_tokens_saved`` is the share of computed tokens that the program of ``tree``
saves, compared with the client. The tokens of prompts are included. Speculation is off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import _programs_clients as clients
from _llamacpp import HOW, SERVER, LlamaServer
from _models import VOCAB, llama_folder
from _programs_doors import TEMPERATURE, Door, GatewayDoor, Http, LlamaDoor, SdkDoor, Words
from _programs_tools import CITY_TOOLS, rated
from _report import report
from _served import HERE, WORKERS, System
from gateway import free_port, wait_until_ready
from tokenbus.clients import AsyncClient
from tokenbus.protocol.scripts import marked_script

ROUNDS = 9
PROMPT = 512
SDK = HERE.parent / "workers" / "controller" / "sdk"
MAX_TOKENS = 1_000
"""Maximum number of tokens of a sequence. No run reaches this number."""
SLOTS, CONTEXT = 16, 1_024
HEARTBEAT_S = 0.2
SETTINGS = {
    "speculation": "off",
    "kv_cache_bytes": str(2**28),
    "allow_tools": "*",
    "heartbeat_s": str(HEARTBEAT_S),
}
OTHERS = (
    ("-m", f"{WORKERS}.state"),
    ("-m", f"{WORKERS}.tool", str(HERE / "_programs_tools.py")),
    ("-m", "tokenbus.clients.gateway"),
)
"""The processes of the system in addition to broker, GPU worker and controller worker."""
TURNS, THOUGHT = 5, 16
CITY = {"city": {"type": "string", "maxLength": 24}}
CALLS = {tool.__name__: tool for tool in CITY_TOOLS}
TOOLS = dict.fromkeys(CALLS, CITY)
REACT = {"tools": TOOLS, "turns": TURNS, "tokens": THOUGHT}
TREE = {"width": 4, "depth": 3, "keep": 3, "tokens": 16}
SEARCH = {"rollouts": 32, "parallel": 8, "width": 4, "depth": 4, "tokens": 16}


class Task(NamedTuple):
    """An algorithm: its program with the program's argument, and its client."""

    program: str
    arg: Any
    client: Callable[[Door[Any], Any], Awaitable[Any]]
    """Runs the client on a server (``Door``), with a prompt in the coding of the server's
    client."""


TASKS = {
    "bestof8": Task(
        "programs/best_of_n.py",
        {"n": 8, "tokens": 40},
        lambda door, prompt: clients.best_of_n(door, prompt, 8, 40),
    ),
    "beam8": Task(
        "examples/beams.c",
        "8 24",
        lambda door, prompt: clients.beam_search(door, prompt, 8, 24),
    ),
    "tree": Task(
        "programs/tree_of_thoughts.py",
        TREE,
        lambda door, prompt: clients.tree_of_thoughts(door, prompt, **TREE),
    ),
    "mcts": Task(
        "programs/tree_search.py",
        {"verifier": "rated", **SEARCH},
        lambda door, prompt: clients.tree_search(door, prompt, rated, **SEARCH),
    ),
    "react": Task(
        "programs/react.py",
        REACT,
        lambda door, prompt: clients.react(door, prompt, TOOLS, CALLS, TURNS, THOUGHT),
    ),
}
SIDES = ("program", "sdk", "client", "llamacpp")
NOTES = {
    "bestof8_vs_client": "best of 8: time of the client over that of the program; at least 1.5",
    "beam8_vs_client": "beam search; at least 5",
    "tree_vs_client": "tree of thoughts; at least 2",
    "mcts_vs_client": "Monte Carlo tree search",
    "react_vs_client": "ReAct with five calls of tools; at least 1.5",
    "bestof8_vs_sdk": "the same with a client in OpenAI's package",
    "beam8_vs_sdk": "",
    "tree_vs_sdk": "",
    "mcts_vs_sdk": "",
    "react_vs_sdk": "",
    "bestof8_vs_llamacpp": "the same with a client of llama.cpp's server",
    "beam8_vs_llamacpp": "",
    "tree_vs_llamacpp": "",
    "mcts_vs_llamacpp": "at least 3",
    "react_vs_llamacpp": "",
    "tree_tokens_saved": "share of the client's computed tokens; at least 0.4",
    **{f"{name}_{side}_ms": "" for name in TASKS for side in SIDES},
}


class Sides:
    """The running systems, on which each task runs as a program and as a client."""

    def __init__(
        self, client: AsyncClient, doors: dict[str, Door[Any]], words: Words, folder: Path
    ) -> None:
        self._client = client
        self._doors = doors
        self._words = words
        self._folder = folder
        self._modules: dict[str, str] = {}
        self._random = random.Random(1)
        self.names = ("program", *doors)

    async def upload(self, names: Sequence[str]) -> None:
        """Uploads the programs of these tasks."""
        for name in names:
            path = SDK / TASKS[name].program
            if path.suffix == ".c":
                content = compiled(path, self._folder)
            else:
                content = marked_script(path.read_bytes(), "python")
            self._modules[name] = (await self._client.upload_controller(content)).module

    async def run(self, name: str, side: str) -> float:
        """Runs a task on a side and returns its seconds. Repeats a run that does not count."""
        while True:
            prompt = [self._random.randrange(1_000, VOCAB) for _ in range(PROMPT)]
            if side == "program":
                calls, seconds = await timed(self._program(name, prompt))
            else:
                door = self._doors[side]
                text = door.words.encode(self._words.decode(prompt))
                calls, seconds = await timed(TASKS[name].client(door, text))
            if name != "react" or calls == TURNS:
                return seconds

    async def _program(self, name: str, prompt: list[int]) -> int:
        """Runs a program to its end; returns the number of its calls of tools."""
        arg = TASKS[name].arg
        stream = self._client.generate(
            prompt,
            controller=self._modules[name],
            controller_arg=arg if isinstance(arg, str) else json.dumps(arg),
            max_tokens=MAX_TOKENS,
            temperature=TEMPERATURE,
            seed=self._random.randrange(2**31),
            ignore_eos=True,
            text=True,
        )
        await stream.wait()
        for sequence in stream.sequences:
            if sequence.error or sequence.finish_reason != "controller":
                raise RuntimeError(f"{name}: {sequence.finish_reason}, {sequence.error}")
        return stream.sequences[0].text.count("Observation: ")

    async def computed_tokens(self, name: str, side: str) -> float:
        """Number of tokens that the worker computes for a run, prefill and decode together."""
        before = await self._computed()
        await self.run(name, side)
        return await self._computed() - before

    async def _computed(self) -> float:
        """Number of tokens that the worker has computed, when it has reported all of them."""
        counts = [-1.0]
        while len(counts) < 3 or counts[-1] != counts[-3]:
            await asyncio.sleep(2 * HEARTBEAT_S)
            status = await self._client.status(metrics=True)
            series = [one for worker in status.workers for one in worker.metrics]
            counts.append(
                sum(
                    one.histogram.total
                    for one in series
                    if one.histogram and one.name == "iteration_tokens_total"
                )
            )
        return counts[-1]


async def timed(run: Awaitable[Any]) -> tuple[Any, float]:
    """The result of a run and its seconds."""
    began = time.perf_counter()
    result = await run
    return result, time.perf_counter() - began


def compiled(source: Path, folder: Path) -> bytes:
    """Compiles a controller in C to Wasm, as the head of its file describes."""
    out = folder / f"{source.stem}.wasm"
    flags = ["-target", "wasm32-freestanding", "-O2", "-g0", "-nostdlib", "-Wl,--no-entry"]
    flags += ["-Wl,-z,stack-size=65536", "-I", str(SDK)]
    subprocess.check_call([sys.executable, "-m", "ziglang", "cc", *flags, source, "-o", out])
    return out.read_bytes()


async def measure(
    system: System,
    doors: dict[str, Door[Any]],
    words: Words,
    folder: Path,
    given: argparse.Namespace,
) -> dict[str, float]:
    """The results of all rounds of the given tasks."""
    times: dict[tuple[str, str], list[float]] = {}
    saved = []
    async with AsyncClient(system.front) as client:
        sides = Sides(client, doors, words, folder)
        await sides.upload(given.only)
        for number in range(-1, 2 if given.quick else ROUNDS):
            for name in given.only:
                for side in sides.names:
                    seconds = await sides.run(name, side)
                    if number >= 0:  # The first runs fill caches.
                        times.setdefault((name, side), []).append(seconds)
        for _ in range(1 if given.quick else 3) if "tree" in given.only else ():
            ours, theirs = [await sides.computed_tokens("tree", s) for s in ("program", "client")]
            saved.append(1 - ours / theirs)
    results = {"tree_tokens_saved": statistics.median(saved)} if saved else {}
    for (name, side), found in times.items():
        results[f"{name}_{side}_ms"] = 1_000 * statistics.median(found)
        if side != "program":
            pairs = zip(found, times[name, "program"], strict=True)
            results[f"{name}_vs_{side}"] = statistics.median(a / b for a, b in pairs)
    return {name: results[name] for name in NOTES if name in results}


def chosen(names: str) -> list[str]:
    """The tasks of ``--only``. Raises ArgumentTypeError if the list has an unknown task."""
    for name in (found := names.split(",")):
        if name not in TASKS:
            raise argparse.ArgumentTypeError(f"unknown task {name}; known: {', '.join(TASKS)}")
    return found


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="run two rounds")
    parser.add_argument(
        "--only",
        type=chosen,
        default=[*TASKS],
        metavar="TASK,…",
        help=f"run only these of the tasks {', '.join(TASKS)}",
    )
    given = parser.parse_args()
    # A signal becomes SystemExit, so that the started processes are ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="tb-") as name, ExitStack() as stack:
        folder = Path(name)
        model = llama_folder(folder / "llama", eos=False, words=True)
        address = f"127.0.0.1:{free_port()}"
        system = System(folder / "run", model, steered=True, http=address, **SETTINGS)
        stack.enter_context(system)
        for command in OTHERS:
            system.start(command)
        system.wait(others={"state", "tool"})
        words = Words(model)
        doors: dict[str, Door[Any]] = {
            "sdk": SdkDoor(address, system.model),
            "client": GatewayDoor(Http(address), system.model, words),
        }
        if SERVER.exists():
            peer = stack.enter_context(LlamaServer(folder / "peer", model, SLOTS, CONTEXT))
            peer.wait()
            doors["llamacpp"] = LlamaDoor(Http(peer.address), words)
        else:
            print(HOW, file=sys.stderr)
        wait_until_ready(address)
        results = asyncio.run(measure(system, doors, words, folder, given))
    report(results, NOTES, given.json)


if __name__ == "__main__":
    main()
