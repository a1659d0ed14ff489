"""Decoders that several threads make at the same time."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "transport", "broker", "workers", "clients", "grammars", "inprocess")

RACE = """
import sys
import threading
import types

import msgspec
from tokenbus.protocol.decoders import convert, json_decoder, msgpack_decoder

sys.setswitchinterval(1e-6)
FIELDS = [f"f{i}" for i in range(30)]
SOURCE = "import msgspec\\n"
SOURCE += "class Inner(msgspec.Struct):\\n"
SOURCE += "".join(f" {f}: 'int | None' = None\\n" for f in FIELDS)
SOURCE += "class Outer(msgspec.Struct):\\n"
SOURCE += "".join(f" {f}: 'int | list[Inner] | None' = None\\n" for f in FIELDS)
VALUE = dict.fromkeys(FIELDS, 1)
CALLS = {
    "json": lambda kind: json_decoder(kind).decode(msgspec.json.encode(VALUE)),
    "msgpack": lambda kind: msgpack_decoder(kind).decode(msgspec.msgpack.encode(VALUE)),
    "convert": lambda kind: convert(VALUE, kind),
}


def run(call, kind, barrier, found):
    barrier.wait()
    found.append(call(kind).f29)


for i in range(100):
    module = sys.modules[f"made{i}"] = types.ModuleType(f"made{i}")
    exec(SOURCE, module.__dict__)
    barrier, found = threading.Barrier(4), []
    args = (CALLS[sys.argv[1]], module.Outer, barrier, found)
    threads = [threading.Thread(target=run, args=args) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 4
"""


@pytest.mark.process
@pytest.mark.parametrize("call", ["json", "msgpack", "convert"])
def test_four_threads_that_first_decode_a_struct_do_not_crash(call: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RACE, call], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr


def test_only_one_module_makes_decoders() -> None:
    makers = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for call in _calls(path)
        if _makes_a_decoder(call)
    }
    assert makers == {"protocol/decoders.py"}


def _calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield node


def _makes_a_decoder(call: ast.Call) -> bool:
    """Whether a call is ``msgspec.json.Decoder(...)``, ``msgspec.convert(...)``, or a ``decode``
    with a type."""
    name = ast.unparse(call.func)
    if name.endswith(".decode") and any(one.arg == "type" for one in call.keywords):
        return True
    return name in {"msgspec.convert"} or name.endswith(("json.Decoder", "msgpack.Decoder"))
