"""A gateway with a tool worker, for the tests of tools that the gateway calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ...processes import Bus, Gateway, Process, until
from .openai_requests import MODEL

TOOLS = """
import asyncio
from pathlib import Path
from typing import Literal

from tokenbus.workers.tool import tool

@tool
def chat_weather(city: Literal["Oslo", "Rome"]) -> str:
    "The weather of a city."
    return f"rain in {city}"

@tool
def chat_numbers() -> list[int]:
    "Numbers that a float cannot represent."
    return [2**53 + 1, 7]

@tool
def chat_long() -> str:
    return "é" * 60_000

@tool
def chat_too_long() -> str:
    return "x" * (128 * 1024 - 4)

@tool
def chat_failing() -> None:
    raise ValueError("no such thing")

@tool
def secret() -> int:
    return 1

@tool
async def chat_counted() -> str:
    with Path(FOLDER, "counted").open("a") as file:
        file.write("x")
    await asyncio.Event().wait()

@tool
async def chat_endless() -> None:
    Path(FOLDER, "begun").touch()
    try:
        await asyncio.Event().wait()
    finally:
        Path(FOLDER, "cancelled").touch()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="module")
def door(steered: Bus, gateway: Gateway, folder: Path) -> Iterator[Gateway]:
    """The gateway of a bus at which a tool worker serves ``TOOLS``."""
    file = folder / "served_tools.py"
    file.write_text(f"FOLDER = {str(folder)!r}\n{TOOLS}")
    arguments = ["tool", "serve", str(file)]
    log = folder / "tool.log"
    process = Process("tokenbus.clients.cli", log, steered.environment, arguments=arguments)
    with steered.client() as client:

        def served() -> bool:
            return any("chat_weather" in w.tools for w in client.status(timeout_s=60).workers)

        try:
            until(served, 300.0, lambda: process.log)
            yield gateway
        finally:
            process.kill()
            # The next module starts another worker with the same tools.
            until(lambda: not served(), 300.0, "the worker has left")


@pytest.fixture(scope="module")
def ending(steered: Bus) -> dict[str, int]:
    """A logit bias with which the model ends its message as soon as the mask allows the end."""
    with steered.client() as client:
        return {str(client.model_info(MODEL).eos_token_ids[0]): 100}
