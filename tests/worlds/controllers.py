"""A whole system whose streams have controllers: uploaded modules and Python classes."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenbus.clients import Client
from tokenbus.clients.results import GeneratedSequence

from ..processes import Bus, Process
from ..workers.controller import scripted

PROMPT = "def add(a, b):"
Options = dict[str, Any]
"""Options of ``Client.generate``, by name."""
SCRIPTED = "scripted:Scripted"
GUEST = """
#include "tokenbus.h"
static uint32_t *mask;
static char mode;
static volatile uint32_t rounds;
void tb_init_prompt(const uint32_t *prompt, uint32_t n, const char *arg, uint32_t arg_len) {
    (void)prompt, (void)n;
    mode = arg_len ? arg[0] : 0;
    mask = tb_mask_new();
    if (mode != 'e') tb_mask_set_all(mask);
}
tb_answer tb_pre_process(void) {
    static bool forked;
    if (mode != 'e' || forked) return forked && tb_seq_id() == 0 ? tb_suspend() : tb_go_on();
    forked = true;
    return tb_fork(2);
}
tb_answer tb_mid_process(const uint32_t *fork_group, uint32_t n) {
    (void)fork_group;
    if (mode == 'l' && ++rounds == 3) for (;;) rounds = 3;
    if (mode == 'e' && n == 2 && tb_seq_id() == 0) return tb_sample(0);
    return tb_sample(mask);
}
"""
"""A guest whose argument chooses its behaviour. With "mask", it allows all tokens with a mask. With
"loop", it has an endless loop in its third round. With "empty", it forks into two sequences: one
has an empty mask, and the other suspends after one token."""


class System:
    """A bus with two models, uploaded modules and Python controllers."""

    def __init__(self, bus: Bus, client: Client, second: str) -> None:
        self.bus = bus
        self.client = client
        self.second = second
        """The name of the model with a different vocabulary."""

    def run(self, prompt: str | list[int] = PROMPT, **options: Any) -> list[GeneratedSequence]:
        options.setdefault("timeout_s", 300)
        return self.client.generate(prompt, **options).wait()

    def script(
        self, *do: Any, prompt: str | list[int] = PROMPT, **options: Any
    ) -> list[GeneratedSequence]:
        """Runs a stream whose controller is ``Scripted``, with the actions ``do``."""
        arg = {"do": do, "tells": options.pop("tells", False)}
        return self.run(prompt, controller=SCRIPTED, controller_arg=arg, **options)

    def idle(self) -> bool:
        """Whether no worker has a request, a used block of the KV cache or a sequence group."""
        workers = self.client.status().workers
        blocks = sum(w.load.get("kv_blocks_used", 0) for w in workers)
        rooms = sum(w.load.get("sessions", 0) for w in workers if w.role == "controller")
        return blocks == 0 and rooms == 0 and sum(w.requests for w in workers) == 0


@contextmanager
def serving_main(
    bus: Bus, folder: Path, module: str, text: str = "async def main(ctx):\n    pass\n"
) -> Iterator[None]:
    """Writes a Python module into a folder. For the ``with`` block, runs a worker that serves the
    module's controller ``main``."""
    (folder / f"{module}.py").write_text(text)
    served = Process(
        "tokenbus.workers.controller",
        folder / "served.log",
        bus.environment,
        arguments=[f"{module}:main"],
    )
    try:
        yield
    finally:
        served.send(signal.SIGTERM)
        served.wait()


def _serving(bus: Bus, *names: str) -> Process:
    """Starts a worker that serves Python controllers."""
    shutil.copy(scripted.__file__, bus.folder)
    (bus.folder / "serve_controllers.py").write_text(
        "import sys\n"
        "from tokenbus.workers.controller.__main__ import main\n"
        f"sys.argv[1:] = {list(names)}\n"
        "sys.exit(main())\n"
    )
    return Process("serve_controllers", bus.folder / "python.log", bus.environment)
