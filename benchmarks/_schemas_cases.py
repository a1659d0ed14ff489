"""Reads the cases of ``schemas.py``: schemas of MaskBench with valid and invalid texts."""

from __future__ import annotations

import json
import random
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

WHERE = Path(__file__).parents[2] / "shared" / "maskbench.tar.gz"
"""The default path of the archive."""


class Case(NamedTuple):
    """A schema, and texts that are marked as valid or invalid under the schema."""

    name: str
    schema: Any
    texts: list[tuple[str, bool]]


def read_cases(archive: Path, max_cases: int) -> list[Case]:
    """The cases of an archive. If there are more than ``max_cases``, this number of cases is chosen
    at random; the choice is the same in each run.

    A case is a file of MaskBench (guidance-ai/jsonschemabench, ``maskbench/data``). The file is an
    object with ``schema`` and ``tests``. Each test has ``data`` and ``valid``. Exits if the archive
    is missing.
    """
    if not archive.exists():
        raise SystemExit(
            f"{archive} is missing; give a .tar.gz of MaskBench's files (guidance-ai/"
            "jsonschemabench on GitHub, maskbench/data) with --maskbench PATH"
        )
    cases = []
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member) if member.name.endswith(".json") else None
            if file is not None:
                cases.append(_case(Path(member.name).stem, json.load(file)))
    cases.sort(key=lambda case: case.name)
    random.Random(1).shuffle(cases)
    return cases[:max_cases]


def _case(name: str, file: Any) -> Case:
    texts = [
        (json.dumps(test["data"], ensure_ascii=False), bool(test["valid"]))
        for test in file["tests"]
    ]
    return Case(name, file["schema"], texts)
