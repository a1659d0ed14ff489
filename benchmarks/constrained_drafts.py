"""Measures the speedup by drafts for streams under a JSON schema and under a regex.

A system with drafts is compared with a system without drafts. In each system, broker, GPU worker
and controller worker are threads of one process with the embedded model. The prompt has rows of
JSON, and the stream continues with more rows. Under the schema, rows differ only in their strings.
The regex allows any row. ``NAME_forced_share`` is the share of tokens that are not sampled, but
appended. Sampling is greedy, and each run has a new session. The tokens and finish reasons of both
systems must be equal, and log-probabilities must differ by less than 1e-4.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import msgspec
from _report import arguments, report
from tokenbus.clients import Client
from tokenbus.inprocess import InProcess
from tokenbus.protocol.settings import Settings

ROWS = [
    {"path": "src/server/handler.py", "function": "handle_request", "status": "needs review"},
    {"path": "src/server/session.py", "function": "handle_session", "status": "needs review"},
    {"path": "src/client/handler.py", "function": "handle_answer", "status": "needs review"},
]
TEXT = {"type": "string", "maxLength": 40}
ROW = {
    "type": "object",
    "properties": dict.fromkeys(ROWS[0], TEXT),
    "required": list(ROWS[0]),
    "additionalProperties": False,
}
LOADS: dict[str, dict[str, Any]] = {
    "json": {"controller": "json_schema", "controller_arg": {"type": "array", "items": ROW}},
    "regex": {"controller": "regex", "controller_arg": r"(\{[ -~]{1,200}\},\n)+"},
}
PROMPT = "".join(f"{msgspec.json.encode(row).decode()},\n" for row in ROWS * 2)


def run(address: str, load: dict[str, Any], new: int) -> tuple[float, list[Any]]:
    """Runs a stream; returns its seconds and its entries."""
    with Client(address) as client:
        began = time.perf_counter()
        entries = list(client.generate(PROMPT, max_tokens=new, **load))
        return time.perf_counter() - began, entries


def check(plain: list[Any], drafted: list[Any]) -> None:
    """Fails if the entries of both systems differ."""
    assert [e.token for e in plain] == [e.token for e in drafted]
    assert plain[-1].finish_reason == drafted[-1].finish_reason
    for one, other in zip(plain, drafted, strict=True):
        assert abs((one.logprob or 0) - (other.logprob or 0)) < 1e-4


def main() -> None:
    """Measures and reports."""
    given = arguments(__doc__)
    rounds, new = (3, 100) if given.quick else (9, 300)
    common: dict[str, Any] = {"device": "cpu", "kv_cache_bytes": 2**26, "threads": 1}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in LOADS}
    forced: dict[str, float] = {}
    with (
        InProcess(Settings(speculation="off", **common)) as off,
        InProcess(Settings(**common)) as on,
    ):
        for number in range(rounds + 1):
            for name, load in LOADS.items():
                (without, plain), (with_drafts, drafted) = (
                    run(side.address, load, new) for side in (off, on)
                )
                check(plain, drafted)
                tokens = [e for e in plain if e.token is not None]
                forced[name] = sum(e.logprob is None for e in tokens) / len(tokens)
                # The first round fills the prefix cache and the caches of masks.
                if number:
                    seconds[name].append((without, with_drafts))
    results = {
        f"constrained_{name}_speedup": statistics.median(a / b for a, b in times)
        for name, times in seconds.items()
    }
    results |= {f"{name}_forced_share": share for name, share in forced.items()}
    notes = {
        "constrained_json_speedup": "ratio of times, without drafts to with drafts, JSON schema",
        "constrained_regex_speedup": "ratio of times, without drafts to with drafts, regex",
    }
    report(results, notes, given.json)


if __name__ == "__main__":
    main()
