"""The memory of a machine, read from Linux's files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenbus.workers.machine import machine_memory

TOTAL = 1024 * 16_000_000
UNLIMITED = "9223372036854771712"


def machine(folder: Path, cgroup: str, limits: dict[str, str]) -> int:
    """The result of ``machine_memory`` on a machine with ``TOTAL`` bytes. ``limits``: the content
    of each file with a limit."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text("MemFree: 5 kB\nMemTotal:       16000000 kB\n")
    (folder / "proc/self/cgroup").write_text(cgroup)
    for name, limit in limits.items():
        file = folder / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")
    return machine_memory(folder / "proc", folder / "cgroup")


@pytest.mark.parametrize(
    ("cgroup", "limits", "right"),
    [
        ("0::/\n", {}, TOTAL),
        ("0::/\n", {"memory.max": "max"}, TOTAL),
        ("0::/\n", {"memory.max": "1000000"}, 1_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "2000000"}, 2_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "3", "a/memory.max": "2"}, 2),
        ("0::/of/the/host\n", {"memory.max": "1000000"}, 1_000_000),
        ("0::/\n", {"memory.max": str(2 * TOTAL)}, TOTAL),
        ("4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "5000"}, 5000),
        ("4:memory:/x\n0::/\n", {"memory/memory.limit_in_bytes": "6000"}, 6000),
        ("4:cpu,memory:/x\n", {"memory/x/memory.limit_in_bytes": UNLIMITED}, TOTAL),
        ("4:cpu:/x\n", {"memory/x/memory.limit_in_bytes": "7000"}, TOTAL),
    ],
)
def test_memory_is_the_smallest_limit_of_the_cgroups(
    tmp_path: Path, cgroup: str, limits: dict[str, str], right: int
) -> None:
    assert machine(tmp_path, cgroup, limits) == right


def test_the_memory_of_this_machine_is_known() -> None:
    assert machine_memory() > 2**20
