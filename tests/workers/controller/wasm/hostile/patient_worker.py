"""A controller worker that gives a call more wall-clock time. On a busy machine, a guest process
with a low priority may need minutes to reach the CPU time of its limit."""

from __future__ import annotations

import sys

from tokenbus.workers.controller.__main__ import main
from tokenbus.workers.controller.guests import process

process.MAX_WALL_S = 500.0

if __name__ == "__main__":
    sys.exit(main())
