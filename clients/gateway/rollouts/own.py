"""``/pause``, ``/resume``, ``/is_paused`` and ``/update_weights``.

A JSON body has the fields of PAUSE, RESUME and UPDATE_WEIGHTS, with their defaults. ``/pause`` and
``/resume`` also take vLLM's query parameters, which the fields of a body override. ``/pause``
without a body has vLLM's default mode.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.messages import PauseMode
from ...request_options import DRAIN_S
from ..bodies.reading import check_json, decode_in_turn, ignored_of, read_bytes
from ..context import gateway_of
from ..json import json_response
from .bodies import (
    MAX_BODY,
    IsPaused,
    PauseBody,
    PauseQuery,
    ResumeBody,
    RolloutAnswer,
    UpdateBody,
    query_of,
    read_optional,
)
from .rights import accepted, operator_of, paused_models


async def pause(request: Request) -> Response:
    """Answers when the workers have paused the model."""
    operator = operator_of(request)
    query = query_of(request)
    body, ignored, given = await read_optional(request, PauseBody)
    model, mode = named(request, body, query), _mode(body, query, given)
    timeout_s = body.timeout_s or DRAIN_S
    done = await accepted(operator.pause(model, mode=mode, timeout_s=timeout_s))
    return json_response(RolloutAnswer.of("paused", done), headers=ignored.headers)


async def resume(request: Request) -> Response:
    """Answers when the workers have resumed the model."""
    operator = operator_of(request)
    query = query_of(request)
    body, ignored, _ = await read_optional(request, ResumeBody)
    model, timeout_s = named(request, body, query), body.timeout_s or DRAIN_S
    done = await accepted(operator.resume(model, timeout_s=timeout_s))
    return json_response(RolloutAnswer.of("resumed", done), headers=ignored.headers)


async def update_weights(request: Request) -> Response:
    """Answers when the workers use the new weights."""
    operator = operator_of(request)
    check_json(request)
    ignored = ignored_of(request)
    content = await read_bytes(request, MAX_BODY)
    body = await decode_in_turn(gateway_of(request), content, UpdateBody, ignored)
    body.check()
    update = operator.update_weights(
        body.folder,
        named(request, body),
        version=body.version or 0,
        mode=body.mode or "recompute",
        timeout_s=body.timeout_s or DRAIN_S,
    )
    done = await accepted(update)
    return json_response(RolloutAnswer.of("updated", done), headers=ignored.headers)


async def is_paused(request: Request) -> Response:
    """Answers whether a model is paused."""
    info = await gateway_of(request).models.info(request.query_params.get("model", ""))
    return json_response(IsPaused(info.name in await paused_models(request)))


def named(request: Request, body: ResumeBody, query: PauseQuery | None = None) -> str:
    """The name of the model that a request names directly or by an alias; empty for the default
    model."""
    name = body.model or (query.model if query is not None else None) or ""
    return gateway_of(request).models.aliases.model(name)


def _mode(body: PauseBody, query: PauseQuery, given: bool) -> PauseMode:
    """The mode of a pause. ``given``: whether there is a body."""
    if body.mode is not None:
        return body.mode
    if query.wait_for_inflight_requests:
        return "wait"
    return query.mode or ("keep" if given else "abort")
