"""LMQL's client and a query of LMQL run unmodified, with LMTP over a WebSocket."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks._environments import lmql

from ..processes import Bus, Gateway
from .install import FOLDER
from .local import PROGRAMS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "protocol.md"


def test_lmql_s_own_client_runs_unmodified(gateway: Gateway, steered: Bus) -> None:
    done = subprocess.run(
        [FOLDER / "lmql/bin/python", PROGRAMS / "lmql_calls.py", gateway.ws_url],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    received = json.loads(done.stdout)
    assert received["info"]["model_info"]["name"] == "embedded"
    with steered.client() as client:
        for number, entries in enumerate(received["generated"]):
            expected = client.generate([263, 305 + number], max_tokens=6, temperature=0.0)
            assert [entry["token"] for entry in entries] == expected.tokens()
            assert all(len(entry["top_logprobs"]) >= 2 for entry in entries)
        for number, entries in enumerate(received["scored"]):
            scores = client.score([263, 305 + number], [7, number])
            assert [entry["token"] for entry in entries] == [7, number]
            assert [entry["logprob"] for entry in entries] == pytest.approx(scores.logprobs)
    assert "max_tokens" in received["invalid"]
    assert "'unknown'" in received["unknown"]
    assert "'unknown'" in received["refused"]["error"]


@pytest.mark.parametrize("transformers", [4, 5])
def test_the_query_of_lmql_in_the_docs_runs_as_it_stands(
    gateway: Gateway, steered: Bus, transformers: int, tmp_path: Path
) -> None:
    """Only the port is replaced. Both versions of transformers load the embedded tokenizer."""
    [query] = re.findall(r"```python\n(import asyncio, lmql\n.*?)```", DOCS.read_text(), re.DOTALL)
    endpoint = gateway.url.removeprefix("http://").replace("127.0.0.1", "localhost")
    file = tmp_path / "query.py"  # LMQL needs the source file of a query.
    file.write_text(query.replace("localhost:8080", endpoint))
    done = subprocess.run(
        [lmql(transformers), file],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with steered.client() as client:
        expected = client.generate("def add(a, b):\n    return ", max_tokens=7).text()
    assert done.stdout.rstrip("\n").endswith(expected)
