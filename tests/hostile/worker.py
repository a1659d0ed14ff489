"""A controller worker whose guest processes can be taken over: see ``takeovers.py``.

All attacks by a process that was taken over use one module. So this worker does not refuse a module
after three deaths of the module's process. With the environment variable ``takeovers.SHORT``, the
worker has lower limits, which shorten the tests.
"""

from __future__ import annotations

import os
import sys

from tokenbus.workers.controller.__main__ import main
from tokenbus.workers.controller.guests import launcher, process, table
from tokenbus.workers.controller.wasm import module_compiler

from .takeovers import SHORT

launcher._ZYGOTE = f"{__package__}.zygote"  # type: ignore[misc]
table.MAX_DEATHS = 1_000_000  # type: ignore[misc]
module_compiler.CPU_S = 8  # type: ignore[misc]
if os.environ.pop(SHORT, ""):
    process.GRACE_S = 0.3  # type: ignore[misc]
    process.MAX_QUESTIONS = 1_000  # type: ignore[misc]

if __name__ == "__main__":
    sys.exit(main())
