"""Uses chat templates to render messages to the text of a prompt, in separate processes.

Templates have the form that transformers defines. The options of ``Templates.render`` have vLLM's
names and effects.
"""

from __future__ import annotations

import asyncio
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, cast

import msgspec

from ....protocol.errors import Code
from ....protocol.json_schema import MAX_BYTES, Rewritten
from ....protocol.python_command import python_command
from ....protocol.shares import max_share
from ..conversation.constraints import KeywordState
from ..errors import ApiError, invalid_field
from ..json import encode
from ..models import ServedModel
from ..users.turns import Turns, current_user
from .plain_template import PLAIN_TEMPLATE
from .template_process import CPU_S, LENGTH, answer_of

WALL_S = 120.0
"""Maximum duration of a rendering, in seconds. It is much longer than ``CPU_S``, because on an
overloaded machine the process starts slowly and gets little CPU time."""
MAX_WAITING = 256
"""Maximum number of unfinished renderings of one process, most of which wait for their turn."""
MAX_OF_ONE = 32
"""Maximum number of one user's unfinished renderings at a process. If other users have many, the
user may have fewer (``max_share``)."""
MAX_LOOP_BYTES = 64 * 1024
"""Maximum size of an answer that the event loop decodes, in bytes. A thread decodes longer ones."""
MAX_TEMPLATE = 256 * 1024
"""Maximum number of characters of a template in a request."""


class Templates:
    """Renders the conversations of all requests of a gateway.

    One process renders the models' templates. Another process renders the templates in requests,
    checks values against schemas and rewrites schemas. A slow template in a request therefore
    delays only requests to the second process. It delays the requests of each other user by at most
    one rendering. Each process is started for its first request.
    """

    def __init__(self, trust_requests: bool = False) -> None:
        """``trust_requests``: whether requests may contain templates."""
        self._trust_requests = trust_requests
        self._of_models: Renderer = RenderingProcess()
        self._of_requests: Renderer = RenderingProcess()

    async def render(
        self,
        model: ServedModel,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """The text of ``messages`` under the model's template, or under ``chat_template``.

        Raises ApiError 400 if the template is not valid, refuses the messages or exceeds a bound,
        or if ``chat_template`` is given and this gateway does not trust requests. Raises ApiError
        429 or 503 if the process has too many requests, and 503 after ``WALL_S``.
        """
        if chat_template is not None and not self._trust_requests:
            raise ApiError(
                400,
                "this gateway does not render chat templates from requests; leave chat_template "
                "out, or start the gateway with --trust-request-chat-template",
                code="chat_template_not_trusted",
                param="chat_template",
            )
        if chat_template is not None and len(chat_template) > MAX_TEMPLATE:
            raise TemplateError(
                f"it has {len(chat_template)} characters; at most {MAX_TEMPLATE} are allowed"
            )
        names: dict[str, Any] = {
            **model.files.special_tokens,
            **(variables or {}),
            "tools": tools or None,
            "documents": (variables or {}).get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        if "messages" in names:
            raise invalid_field(
                "chat_template_kwargs",
                "chat_template_kwargs has 'messages', which the template gets from the request; "
                "remove 'messages'",
            )
        request = {
            "template": template_of(model) if chat_template is None else chat_template,
            "messages": messages,
            "variables": names,
            "continue_final_message": continue_final_message,
        }
        renderer = self._of_models if chat_template is None else self._of_requests
        answer = await renderer.ask(lambda: encode(request))
        if "limit" in answer:
            raise TemplateError(answer["limit"])
        if "fault" in answer:
            raise TemplateRefusalError(answer["fault"])
        return cast(str, answer["text"])

    async def validate(
        self, schema: bytes, value: Any, keywords: Sequence[str]
    ) -> dict[str, KeywordState]:
        """For each of ``keywords``, the outcome of the check of a value against a JSON schema
        (``schema_check.py``). ``schema``: the schema, encoded as JSON. Raises ApiError if the check
        takes too long."""
        request = {"schema": msgspec.Raw(schema), "value": value, "keywords": keywords}
        answer = await self._of_requests.ask(lambda: encode(request))
        return {name: cast(KeywordState, state) for name, state in answer.items()}

    async def rewritten(self, schema: dict[str, Any]) -> Rewritten:
        """Rewrites a JSON schema for which ``needs_rewriting`` is true (``protocol.json_schema``).
        This may take 0.2 s of CPU time. Raises ApiError if too many requests wait."""
        unchanged = Rewritten(schema, [], [])
        try:
            request = encode({"rewrite": schema})
        except RecursionError:
            return unchanged
        if len(request) > MAX_BYTES:
            return unchanged
        return Rewritten(**await self._of_requests.ask(lambda: request))

    async def close(self) -> None:
        """Ends both processes."""
        for renderer in (self._of_models, self._of_requests):
            await renderer.end()


def template_of(model: ServedModel) -> str:
    """The model's own template; ``PLAIN_TEMPLATE`` if the model does not have a template."""
    return model.files.chat_template or PLAIN_TEMPLATE


class TemplateError(ApiError):
    """A template cannot be rendered with a request."""

    def __init__(self, what: str) -> None:
        super().__init__(
            400,
            f"the chat template cannot be rendered with this request: {what}",
            code="chat_template_error",
            param="messages",
        )


class TemplateRefusalError(TemplateError):
    """The template has failed with these messages, for example because it refuses their order."""


EncodeRequest = Callable[[], bytes]
"""Encodes a request as JSON. It is called when the request has its turn, so that a waiting request
has no second copy of its texts."""


class Renderer(Protocol):
    """Answers the requests that ``template_process`` defines."""

    async def ask(self, request: EncodeRequest) -> dict[str, Any]:
        """The answer of ``template_process`` to a request; raises ApiError."""

    async def end(self) -> None:
        """Ends the renderer's process, if it has one."""


class OwnTemplates(Templates):
    """Renders templates in the process of a Python client instead of a separate process, in
    Jinja's sandbox as transformers does."""

    def __init__(self) -> None:
        super().__init__(trust_requests=True)
        self._of_models = self._of_requests = _InProcess()


class _InProcess:
    async def ask(self, request: EncodeRequest) -> dict[str, Any]:
        return answer_of(msgspec.json.decode(request()))

    async def end(self) -> None:
        """Does nothing, because templates are rendered in the client's own process."""


class RenderingProcess:
    """A process that renders templates. If a template has ended the process, the next request
    starts a new one."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._turns = Turns()
        self._asked: set[asyncio.Task[dict[str, Any]]] = set()
        self._users = Counter[str]()
        """Number of unfinished renderings by user."""

    async def ask(self, request: EncodeRequest) -> dict[str, Any]:
        """The process's answer to a request. Raises ApiError if too many requests wait, or if the
        process ends or takes too long."""
        user = current_user.get()
        total, own = len(self._asked), self._users[user]
        full = total >= MAX_WAITING
        most = min(MAX_OF_ONE, max_share(own, total, MAX_WAITING))
        if full or own >= most:
            raise ApiError(
                503 if full else 429,
                f"{total} conversations wait for rendering (at most {MAX_WAITING}), {own} of them "
                f"are yours (at most {most}); try again later",
                code=Code.QUEUE_FULL if full else Code.CLIENT_LIMIT,
                retry_after_s=CPU_S,
            )
        # If the client disconnects, the process and a running rendering continue.
        asked = asyncio.ensure_future(self._in_turn(user, request))
        self._asked.add(asked)
        self._users[user] += 1
        asked.add_done_callback(partial(self._answered, user))
        return await asyncio.shield(asked)

    def _answered(self, user: str, asked: asyncio.Task[dict[str, Any]]) -> None:
        self._asked.discard(asked)
        self._users[user] -= 1
        if not self._users[user]:
            del self._users[user]
        if not asked.cancelled():
            asked.exception()  # Marks the error as retrieved, so that asyncio does not log it.

    async def _in_turn(self, user: str, request: EncodeRequest) -> dict[str, Any]:
        async with self._turns.of(user):
            answer = await self._exchange(request())
            if len(answer) <= MAX_LOOP_BYTES:
                found = msgspec.json.decode(answer)
            else:
                found = await asyncio.to_thread(msgspec.json.decode, answer)
            return cast(dict[str, Any], found)

    async def _exchange(self, request: bytes) -> bytes:
        process = self._process or await _start()
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(WALL_S):
                process.stdin.write(LENGTH.pack(len(request)))
                process.stdin.write(request)
                await process.stdin.drain()
                head = await process.stdout.readexactly(LENGTH.size)
                return await process.stdout.readexactly(LENGTH.unpack(head)[0])
        except TimeoutError:
            await self.end()
            raise ApiError(
                503, "rendering the chat template took too long", retry_after_s=CPU_S
            ) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            ended = await process.wait()
            await self.end()
            raise TemplateError(
                f"the template takes more than {CPU_S} s of CPU time"
                if ended == -signal.SIGXCPU
                else f"the rendering process ended with {ended}"
            ) from None
        except BaseException:
            # The process is ended. Otherwise the next request would receive the answer to this
            # request.
            await self.end()
            raise

    async def end(self) -> None:
        """Ends the process. The next request starts a new process."""
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _start() -> Process:
    # The process has its own session, so that Ctrl-C in the terminal reaches only the gateway.
    return await asyncio.create_subprocess_exec(
        *python_command("tokenbus.clients.gateway.templates.template_process"),
        stdin=PIPE,
        stdout=PIPE,
        stderr=DEVNULL,
        cwd="/",
        start_new_session=True,
    )
