"""Each seeded fault fits the present code, and changes one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from .__main__ import faulty
from .faults import FAULTS, Fault


def test_there_are_at_least_thirty() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])
def test_a_fault_can_be_seeded(fault: Fault, tmp_path: Path) -> None:
    copy = faulty(fault, tmp_path)
    ast.parse((copy / fault.file).read_text())
