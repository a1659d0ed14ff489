"""The calls that a tool worker runs, and their answers, which are kept until the request ends.

All methods run on the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from ...protocol.bodies import decode_as, encode_body
from ...protocol.errors import Code, RequestError, TokenbusError, UnavailableError
from ...protocol.header import encode_header
from ...protocol.pace import RETRY_AFTER_S
from ...protocol.worker_messages import MAX_RESULT_BYTES, Call, CallAnswer
from ..bus import FromBus
from .functions import Served
from .kept_answers import CallName, KeptAnswers, RequestKey
from .threads import CallOwner, Threads

log = logging.getLogger(__name__)

MAX_ERROR = 2_000
"""Maximum characters of the error of a tool; the rest is cut off."""


class Calls:
    """The running calls and the kept answers."""

    def __init__(
        self,
        tools: Mapping[str, Served],
        post: Callable[[list[bytes], int], None],
        threads: int,
        capacity: int,
    ) -> None:
        """``post`` sends frames over a link. ``threads``: maximum number of functions without
        ``async`` that run at the same time. ``capacity``: maximum number of running and waiting
        calls."""
        self._tools = tools
        self._post = post
        self._threads = Threads(threads)
        self._capacity = capacity
        self._running: dict[RequestKey, dict[CallName, asyncio.Task[None]]] = {}
        self._kept = KeptAnswers()
        self.num_running = 0
        self.num_done = 0
        """Calls that have been answered since the worker started."""

    def begin(self, message: FromBus) -> None:
        """Handles CALL: begins the call. If the call is already running, does nothing. If its
        answer is kept, sends the answer again."""
        call: Call = decode_as(Call, message.body, "msgpack")
        key, name = (message.link, call.request), (call.lineage, call.count)
        if name in self._running.get(key, ()):
            return
        kept = self._kept.get(key, name)
        if kept is not None:
            self._send(key, kept)
            return
        try:
            tool = self._accepted(call)
        except TokenbusError as error:
            self._answer(key, call, error=error)
            return
        self.num_running += 1
        task = asyncio.get_running_loop().create_task(self._run(key, call, tool))
        self._running.setdefault(key, {})[name] = task

    def end(self, link: int, request: int | None = None) -> None:
        """Drops a request that has ended, or all requests of a link, and cancels their calls. A
        function without ``async`` continues, and its result is dropped."""
        for key in [*self._running, *self._kept.requests]:
            if key[0] == link and request in (None, key[1]):
                for task in self._running.pop(key, {}).values():
                    task.cancel()
                self._kept.drop(key)

    # --- inside ---------------------------------------------------------------------------------

    def _accepted(self, call: Call) -> Served:
        """The tool of a call; raises TokenbusError if the call is refused."""
        tool = self._tools.get(call.tool)
        if call.again:
            raise RequestError(
                Code.WORKER_LOST,
                f"the call of the tool {call.tool!r} was interrupted, and its answer is lost; the "
                "tool may have done its work, and is not called again",
            )
        if tool is None:
            raise RequestError(
                Code.NO_WORKER, f"this worker does not serve the tool {call.tool!r} any more"
            )
        if self.num_running >= self._capacity:
            raise UnavailableError(
                Code.QUEUE_FULL,
                f"the worker of the tool {call.tool!r} runs {self.num_running} calls, which is the "
                "maximum; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        return tool

    async def _run(self, key: RequestKey, call: Call, tool: Served) -> None:
        """Runs a call and sends the answer, unless the call's request ends before the call."""
        try:
            async with asyncio.timeout(tool.info.timeout_s) as timeout:
                by = CallOwner(call.owner, call.user)
                result = await tool.call(call.arguments, partial(self._in_thread, by))
            self._answer(key, call, _encoded(tool.info.name, result))
        except TokenbusError as error:
            self._answer(key, call, error=error)
        except TimeoutError as error:
            failure = _failure(call, error)
            if timeout.expired():
                late = f"the tool {call.tool!r} did not answer within {tool.info.timeout_s:g} s"
                failure = RequestError(Code.TIMEOUT, late)
            self._answer(key, call, error=failure)
        except Exception as error:
            log.info("the tool %s failed", call.tool, exc_info=error)
            self._answer(key, call, error=_failure(call, error))
        finally:
            self.num_running -= 1
            of_request = self._running.get(key, {})
            # After a cancellation, the table does not have this call any more, or it has the same
            # call of a later attempt.
            if of_request.get((call.lineage, call.count)) is asyncio.current_task():
                del of_request[call.lineage, call.count]
                if not of_request:
                    del self._running[key]

    async def _in_thread(self, by: CallOwner, function: Callable[[], Any]) -> Any:
        """The result of a function, which runs on a thread. The thread counts towards the share of
        ``by`` until the function returns, even if the call was cancelled or has timed out."""
        await self._threads.acquire(by)
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def done(value: Any, error: BaseException | None) -> None:
            self._threads.release(by)
            if result.cancelled():
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        def run() -> None:
            value, raised = None, None
            try:
                value = function()
            except BaseException as error:
                # A future does not accept StopIteration. SystemExit would end the event loop.
                plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                raised = error if plain else RuntimeError(f"{type(error).__name__}: {error}")
            try:
                loop.call_soon_threadsafe(done, value, raised)
            except RuntimeError:
                pass  # The worker has ended.

        try:
            threading.Thread(target=run, name="tool", daemon=True).start()
        except RuntimeError:
            self._threads.release(by)
            raise
        return await result

    def _answer(
        self, key: RequestKey, call: Call, value: bytes = b"", error: TokenbusError | None = None
    ) -> None:
        """Sends the answer of a call, and keeps it."""
        answer = CallAnswer(call.request, call.lineage, call.count, value)
        if error is not None:
            answer.error, answer.code = error.message[:MAX_ERROR], str(error.code)
        body = encode_body(answer, "msgpack")
        self.num_done += 1
        by = CallOwner(call.owner, call.user)
        self._kept.add(key, (call.lineage, call.count), by, body)
        self._send(key, body)

    def _send(self, key: RequestKey, body: bytes) -> None:
        link, request = key
        self._post([b"CALL_ANSWER", encode_header(request), body], link)


def _encoded(tool: str, result: Any) -> bytes:
    """The JSON of a result; raises RequestError if JSON cannot represent the result, or if the JSON
    is too long."""
    try:
        value = msgspec.json.encode(result)
    except (TypeError, ValueError, RecursionError) as error:
        text = f"the result of the tool {tool!r} cannot be written as JSON: {error}"
        raise RequestError(Code.TOOL_FAILED, text) from None
    if len(value) > MAX_RESULT_BYTES:
        raise RequestError(
            Code.TOOL_FAILED,
            f"the result of the tool {tool!r} has {len(value)} bytes; at most {MAX_RESULT_BYTES} "
            "are allowed",
        )
    return value


def _failure(call: Call, error: Exception) -> TokenbusError:
    text = str(error)
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return RequestError(Code.TOOL_FAILED, f"the tool {call.tool!r} failed: {what}")
