"""Each folder imports only from the folders that the layout allows, and imports have no cycle.

``ALLOWED`` is the table of docs/architecture.md. The tests compare the page and all imports with
this table. Imports inside functions count too; imports that only a type checker sees do not.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import pytest
from tokenbus.clients.cli.main import COMMANDS

ROOT = Path(__file__).parents[1]

ALLOWED = {
    "protocol": set[str](),
    "transport": {"protocol"},
    "broker": {"protocol"},
    "workers": {"protocol", "transport"},
    "workers/gpu": {"protocol", "transport", "workers"},
    "workers/controller": {"protocol", "transport", "workers", "grammars"},
    "workers/state": {"protocol", "transport", "workers"},
    "workers/tool": {"protocol", "transport", "workers"},
    "grammars": set[str](),
    "clients": {"protocol", "transport"},
    "inprocess": {
        "protocol",
        "transport",
        "broker",
        "workers/gpu",
        "workers/controller",
        "workers/state",
    },
}
"""The folders from which each folder may import, besides itself."""

LAZY = {
    ("clients/cli", "grammars"),
    ("clients/cli", "workers/controller"),
    ("clients/cli", "workers/gpu"),
}
"""Exceptions, as pairs of the importing and the imported folder. ``tokenbus grammar`` computes
masks with the controller worker's code, by default for the tokenizer of the embedded model. This
code is imported only when the command runs, so that a client works without the extra
``controller``."""

FORBIDDEN = {
    "protocol": {"zmq", "torch", "transformers", "wasmtime", "asyncio", "socket"},
    "broker": {"torch", "transformers", "wasmtime", "numpy", "llguidance", "tokenizers"},
    "workers/gpu": {"wasmtime", "llguidance"},
    "workers/controller": {"torch", "transformers"},
    "workers/state": {"torch", "transformers", "wasmtime", "numpy", "llguidance", "tokenizers"},
    "workers/tool": {"torch", "transformers", "wasmtime", "numpy", "llguidance", "tokenizers"},
    "grammars": {"zmq", "torch", "transformers", "wasmtime", "numpy", "llguidance", "tokenizers"},
    "clients": {"torch", "transformers"},
}
"""Packages outside this project that a folder never imports."""


class Import:
    """One import in one of our modules."""

    def __init__(self, module: str, line: int, target: str, top_level: bool) -> None:
        self.module = module
        self.line = line
        self.target = target
        """The dotted name of the imported module. Our modules begin with ``tokenbus.``."""
        self.top_level = top_level

    def __str__(self) -> str:
        return f"{self.module} (line {self.line}) imports {self.target}"


def sources() -> dict[str, Path]:
    """Our modules by their dotted names."""
    found = {}
    for folder in {name.split("/")[0] for name in ALLOWED}:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if parts[-1] == "__init__":
                parts = parts[:-1]
            found[".".join(("tokenbus", *parts))] = path
    return found


def imports(modules: dict[str, Path]) -> Iterator[Import]:
    """All imports of these modules, without those that only a type checker sees."""
    for module, path in modules.items():
        package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
        tree = ast.parse(path.read_text())
        top = {id(node) for node in tree.body}
        for node in _statements(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield Import(module, node.lineno, alias.name, id(node) in top)
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else []
                name = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    inner = f"{name}.{alias.name}"
                    target = inner if inner in modules else name
                    yield Import(module, node.lineno, target, id(node) in top)


def _statements(block: ast.AST) -> Iterator[ast.AST]:
    """The statements of a block and of its inner blocks, except those in ``if TYPE_CHECKING``."""
    if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test):
        return
    for part in ("body", "orelse", "finalbody", "handlers", "cases"):
        for statement in getattr(block, part, ()):
            yield statement
            yield from _statements(statement)


def folder_of(module: str) -> str:
    """The folder in ``ALLOWED`` that contains one of our modules."""
    path = "/".join(module.split(".")[1:])
    names = [name for name in ALLOWED if path == name or path.startswith(f"{name}/")]
    return max(names, key=len)


@pytest.fixture(scope="module")
def modules() -> dict[str, Path]:
    return sources()


@pytest.fixture(scope="module")
def found(modules: dict[str, Path]) -> list[Import]:
    """All imports."""
    return list(imports(modules))


@pytest.fixture(scope="module")
def ours(found: list[Import]) -> list[Import]:
    """The imports of our own modules."""
    return [one for one in found if one.target.startswith("tokenbus.")]


def test_every_import_of_ours_names_a_module_of_ours(
    modules: dict[str, Path], ours: list[Import]
) -> None:
    assert [str(one) for one in ours if one.target not in modules] == []


def test_no_import_runs_against_the_layout(ours: list[Import]) -> None:
    wrong = []
    for one in ours:
        source, target = folder_of(one.module), folder_of(one.target)
        exception = ("/".join(one.module.split(".")[1:3]), target) in LAZY
        if source != target and target not in ALLOWED[source] and not exception:
            wrong.append(str(one))
    assert wrong == []


@pytest.mark.parametrize("entry", ["tokenbus.clients", "tokenbus.clients.cli.main"])
def test_a_client_loads_nothing_but_clients_and_protocol(entry: str, ours: list[Import]) -> None:
    loaded: set[str] = set()
    todo = [entry]
    if entry.endswith("main"):
        todo += [resolve_name(module, "tokenbus.clients.cli") for module in COMMANDS.values()]
    while todo:
        module = todo.pop()
        if module not in loaded:
            loaded.add(module)
            todo += [one.target for one in ours if one.module == module and one.top_level]
    assert {folder_of(module) for module in loaded} <= {"clients", *ALLOWED["clients"]}


def test_every_exception_is_needed(ours: list[Import]) -> None:
    used = {("/".join(one.module.split(".")[1:3]), folder_of(one.target)) for one in ours}
    assert used >= LAZY


def test_no_folder_imports_a_package_that_it_must_do_without(found: list[Import]) -> None:
    wrong = [
        str(one)
        for one in found
        if one.target.split(".")[0] in FORBIDDEN.get(folder_of(one.module), ())
    ]
    assert wrong == []


def test_no_imports_run_in_a_circle(modules: dict[str, Path], ours: list[Import]) -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for one in ours:
        if one.top_level and one.target != one.module:
            graph[one.module].add(one.target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}")


def test_the_folders_do_not_wait_for_each_other(ours: list[Import]) -> None:
    """The imports between folders have no cycle either, with lazy imports included."""
    graph: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for one in ours:
        source, target = folder_of(one.module), folder_of(one.target)
        if source != target:
            graph[source].add(target)
    TopologicalSorter(graph).prepare()


def test_the_table_in_the_docs_is_this_one() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = {}
    for folder, may in re.findall(r"^\| `([a-z/]+)/` \|.*\| ([^|]*) \|$", text, re.MULTILINE):
        table[folder] = set(re.findall(r"`([a-z/]+)/`", may))
    assert {name: table.get(name) for name in ALLOWED} == ALLOWED


def test_only_what_is_declared_or_in_the_standard_library_is_imported(found: list[Import]) -> None:
    declared = {
        re.split(r"[\[<>=!;~ ]", line)[0].replace("-", "_").lower()
        for line in re.findall(
            r'^    "([^"]+)",', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
        )
    }
    names = {"zmq": "pyzmq", "google": "protobuf", "opentelemetry": "opentelemetry_sdk"}
    wrong = set()
    for one in found:
        top = one.target.split(".")[0]
        if top == "tokenbus" or top in sys.stdlib_module_names:
            continue
        if names.get(top, top) not in declared:
            wrong.add(str(one))
    assert wrong == set()
