"""Functions as tools: schemas from type hints, arguments by name, and functions that cannot be
tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from tokenbus.protocol.errors import RequestError
from tokenbus.workers.tool import tool
from tokenbus.workers.tool.functions import Function, load_tools


class Point(msgspec.Struct):
    x: int
    y: int = 0


def weather(city: str, unit: Literal["C", "F"] = "C", days: list[int] = [1]) -> str:  # noqa: B006
    """The weather of a city."""
    return f"{city} {unit} {days}"


async def norm(at: Point, *, scale: float = 1.0) -> float:
    return scale * (at.x**2 + at.y**2)


def run(function: Callable[..., Any], arguments: bytes) -> Any:
    async def in_thread(call: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(call)

    return asyncio.run(Function(function, 1.0).call(arguments, in_thread))


def test_the_schema_follows_from_the_type_hints() -> None:
    info = Function(weather, 2.0).info
    assert (info.name, info.description, info.timeout_s) == (
        "weather",
        "The weather of a city.",
        2.0,
    )
    assert info.parameters["type"] == "object"
    assert info.parameters["required"] == ["city"]
    assert info.parameters["additionalProperties"] is False
    assert info.parameters["properties"]["unit"] == {"enum": ["C", "F"], "default": "C"}


def test_a_type_of_its_own_is_a_definition_of_the_schema() -> None:
    parameters = Function(norm, 1.0).info.parameters
    assert parameters["properties"]["at"] == {"$ref": "#/$defs/Point"}
    assert parameters["$defs"]["Point"]["required"] == ["x"]


def test_arguments_are_decoded_into_their_types() -> None:
    assert run(weather, b'{"city":"Oslo"}') == "Oslo C [1]"
    assert run(norm, b'{"at":{"x":3,"y":4},"scale":2}') == 50.0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (b"{}", "missing required field `city`"),
        (b'{"city":5}', r"Expected `str`, got `int` - at `\$.city`"),
        (b'{"city":"a","town":"b"}', "unknown field `town`"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"{", "the arguments of the tool 'weather' are not valid"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: bytes, error: str) -> None:
    with pytest.raises(RequestError, match=error):
        run(weather, arguments)


def with_list(*names: str) -> None: ...


def by_position(a: int, /) -> None: ...


def unknown(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821


@pytest.mark.parametrize("function", [with_list, by_position, unknown])
def test_a_function_without_a_schema_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match="has parameters without a schema"):
        Function(function, 1.0)


@pytest.mark.parametrize(
    ("how", "error"), [({"name": "a b"}, "not a name"), ({"name": "a", "timeout_s": 0}, "is 0 s")]
)
def test_a_mark_that_is_not_valid_is_refused(how: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        Function(tool(**how)(lambda: None), 1.0)


def test_marked_functions_are_served_or_else_all_public_ones(tmp_path: Path) -> None:
    file = tmp_path / "some_tools.py"
    file.write_text("from json import loads\ndef a(): ...\ndef b(): ...\ndef _c(): ...\n")
    assert list(load_tools(str(file), 5.0)) == ["a", "b"]
    file.write_text(
        "from tokenbus.workers.tool import tool\ndef a(): ...\n"
        "@tool(name='x.y', timeout_s=9)\ndef b(): ...\n"
    )
    [served] = load_tools(str(file), 5.0).values()
    assert (served.info.name, served.info.timeout_s) == ("x.y", 9)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("import nothing_like_this", "cannot load .*nothing_like_this"),
        ("X = 1", "has no functions"),
        (
            "from tokenbus.workers.tool import tool\n@tool\ndef a(): ...\n"
            "@tool(name='a')\ndef b(): ...\n",
            "two tools with the name 'a'",
        ),
    ],
)
def test_a_file_that_cannot_be_served_is_refused(tmp_path: Path, text: str, error: str) -> None:
    file = tmp_path / "wrong_tools.py"
    file.write_text(text)
    with pytest.raises(RequestError, match=error):
        load_tools(str(file), 5.0)


@pytest.mark.parametrize("source", ["mytools.py:weather", "mytools:weather", "./mytools", ""])
def test_a_source_that_is_neither_a_file_nor_a_module_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match=r"expected a file such as mytools\.py, or a module"):
        load_tools(source, 5.0)


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(RequestError, match=r"/nowhere\.py does not exist"):
        load_tools("/nowhere.py", 5.0)
