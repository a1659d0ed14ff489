"""The tools of a server of the Model Context Protocol (MCP). The server runs as a child process of
the worker.

Source: the client of the package mcp (https://modelcontextprotocol.io), which sends and receives
over the server's standard input and output.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shlex
from collections.abc import Callable
from typing import Any

import msgspec
from mcp import ClientSession, MCPError, StdioServerParameters, stdio_client
from mcp import Tool as McpTool
from mcp.types import CONNECTION_CLOSED, CallToolResult, PaginatedRequestParams, TextContent

from ...protocol.decoders import json_decoder
from ...protocol.errors import Code, RequestError
from ...protocol.messages import TOOL_NAME, Tool
from .functions import InThread, Served

log = logging.getLogger(__name__)

START_S = 60.0
"""Maximum time until a server has listed its tools, in seconds."""
MAX_TOOLS = 1_000

_decode = json_decoder(dict[str, Any]).decode


class McpServer:
    """An MCP server. When the worker ends, the server's standard input is closed, and the server
    ends."""

    def __init__(self, command: str, timeout_s: float, ended: Callable[[str], None]) -> None:
        """``command``: the server and its arguments, as in a shell. ``timeout_s``: the time-out of
        each tool. When the server has ended, ``ended`` is called with the reason, because the
        worker can no longer serve the server's tools. Raises RequestError if the command is not
        valid."""
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise _wrong(f"{command!r} is not a valid command: {error}") from None
        if not words:
            raise _wrong("the command of the MCP server is empty; give a program and its arguments")
        self._command = command
        self._parameters = StdioServerParameters(command=words[0], args=words[1:])
        self._timeout_s = timeout_s
        self._ended = ended
        self._session: ClientSession
        self._task: asyncio.Task[None]

    def start(self, loop: asyncio.AbstractEventLoop) -> dict[str, Served]:
        """Starts the server on a running event loop; returns its tools. Raises RequestError if the
        server does not start."""
        try:
            return asyncio.run_coroutine_threadsafe(self._begin(), loop).result()
        except RequestError:
            raise
        except Exception as error:
            text = str(_cause(error)) or type(_cause(error)).__name__
            raise _wrong(f"the MCP server {self._command!r} did not start: {text}") from None

    async def call(self, name: str, arguments: bytes) -> Any:
        """Calls a tool of the server; returns its structured result, or else its text. Raises
        RequestError if the arguments are not valid or the tool fails."""
        try:
            given = _decode(arguments or b"{}")
        except msgspec.MsgspecError as error:
            text = f"the arguments of the tool {name!r} are not valid: {error}"
            raise RequestError(Code.INVALID_FIELD, text) from None
        try:
            answer = await self._session.call_tool(name, given)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self._ended("the MCP server has ended")
            raise RequestError(Code.TOOL_FAILED, f"the tool {name!r} failed: {error}") from None
        if not isinstance(answer, CallToolResult):
            text = f"the tool {name!r} requests input, which programs cannot give"
            raise RequestError(Code.TOOL_FAILED, text)
        return _result(name, answer)

    # --- inside ---------------------------------------------------------------------------------

    async def _begin(self) -> dict[str, Served]:
        listed: asyncio.Future[list[McpTool]] = asyncio.get_running_loop().create_future()
        # The loop has only a weak reference to a task, so the task is stored here.
        self._task = asyncio.create_task(self._serve(listed))
        tools = await asyncio.wait_for(listed, START_S)
        return {tool.name: _McpTool(self, tool, self._timeout_s) for tool in tools}

    async def _serve(self, listed: asyncio.Future[list[McpTool]]) -> None:
        """Runs the server until the task is cancelled. The package requires that the same task
        opens and closes a connection."""
        try:
            async with (
                stdio_client(self._parameters) as (reads, writes),
                ClientSession(reads, writes) as session,
            ):
                self._session = session
                await session.initialize()
                listed.set_result(await _listed(session))
                await asyncio.Event().wait()
        except Exception as error:
            if not listed.done():
                listed.set_exception(error)
            else:
                self._ended(f"the MCP server has ended: {error}")


class _McpTool:
    """A tool of a server (``Served``)."""

    def __init__(self, server: McpServer, tool: McpTool, timeout_s: float) -> None:
        self._server = server
        self.info = Tool(
            name=tool.name,
            description=tool.description or "",
            parameters=tool.input_schema,
            timeout_s=timeout_s,
        )

    async def call(self, arguments: bytes, in_thread: InThread) -> Any:
        """Calls the tool, as ``Served.call`` describes."""
        return await self._server.call(self.info.name, arguments)


async def _listed(session: ClientSession) -> list[McpTool]:
    """The tools of a server. A server lists its tools page by page. Pages are read until
    ``MAX_TOOLS`` tools are found or the list ends. Tools whose names are not valid are left out."""
    tools: list[McpTool] = []
    cursor = None
    while len(tools) < MAX_TOOLS:
        params = PaginatedRequestParams(cursor=cursor) if cursor is not None else None
        page = await session.list_tools(params=params)
        for tool in page.tools:
            if re.fullmatch(TOOL_NAME, tool.name):
                tools.append(tool)
            else:
                log.warning("left out the tool %r, whose name is not valid", tool.name)
        cursor = page.next_cursor
        if cursor is None:
            break
    return tools


def _result(name: str, answer: CallToolResult) -> Any:
    texts = [part.text for part in answer.content if isinstance(part, TextContent)]
    if answer.is_error:
        text = "\n".join(texts) or "without a message"
        raise RequestError(Code.TOOL_FAILED, f"the tool {name!r} failed: {text}")
    if answer.structured_content is None:
        return "\n".join(texts)
    structured = answer.structured_content
    # If the result of a tool is not an object, the server wraps it in an object with the key
    # ``result``.
    alone = isinstance(structured, dict) and structured.keys() == {"result"}
    return structured["result"] if alone else structured


def _cause(error: Exception) -> Exception:
    """The first error of an exception group. The package raises a group if a task group has
    failed."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error


def _wrong(message: str) -> RequestError:
    return RequestError(Code.INVALID_FIELD, message)
