"""The requests under SGLang's names: ``/pause_generation``, ``/continue_generation``,
``/abort_request``, ``/update_weights_from_disk``, ``/flush_cache`` and
``/get_weight_version``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.requests import Request
from starlette.responses import Response

from ....protocol.errors import TokenbusError
from ....protocol.messages import PauseMode, Rollout, UpdateMode
from ...operator import AsyncOperator
from ...request_options import DRAIN_S
from ..bodies.reading import check_json, decode_in_turn, ignored_of, read_bytes
from ..context import gateway_of
from ..json import json_response
from ..openai.token_fields import weights_label
from .bodies import (
    MAX_BODY,
    AbortBody,
    ContinueBody,
    DiskBody,
    Message,
    PauseGenerationBody,
    Updated,
    WeightVersion,
    read_optional,
)
from .own import named
from .rights import accepted, operator_of, paused_models


async def pause_generation(request: Request) -> Response:
    """Answers when the workers have paused the model."""
    operator = operator_of(request)
    body, ignored, _ = await read_optional(request, PauseGenerationBody)
    mode: PauseMode = "keep" if body.mode in ("in_place", "retract") else "abort"
    model, timeout_s = named(request, body), body.timeout_s or DRAIN_S
    done = await accepted(operator.pause(model, mode=mode, timeout_s=timeout_s))
    return json_response(Message(f"Generation paused: {_shown(done)}"), headers=ignored.headers)


async def continue_generation(request: Request) -> Response:
    """Answers when the workers have resumed the model."""
    operator = operator_of(request)
    body, ignored, _ = await read_optional(request, ContinueBody)
    model, timeout_s = named(request, body), body.timeout_s or DRAIN_S
    done = await accepted(operator.resume(model, timeout_s=timeout_s))
    return json_response(Message(f"Generation continued: {_shown(done)}"), headers=ignored.headers)


async def abort_request(request: Request) -> Response:
    """Answers when all live streams of the model have ended with the code ``cancelled``. Answers in
    SGLang's format have the tokens so far and the finish reason ``abort``."""
    operator = operator_of(request)
    body, ignored, _ = await read_optional(request, AbortBody)
    body.check()
    model, timeout_s = named(request, body), body.timeout_s or DRAIN_S
    async with _aborted(request, operator, model, timeout_s) as done:
        pass
    return json_response(Message(f"Aborted: {_shown(done)}"), headers=ignored.headers)


async def update_from_disk(request: Request) -> Response:
    """Answers when the workers use the new weights."""
    operator = operator_of(request)
    check_json(request)
    ignored = ignored_of(request)
    content = await read_bytes(request, MAX_BODY)
    body = await decode_in_turn(gateway_of(request), content, DiskBody, ignored)
    if body.abort_all_requests:
        done = await accepted(_without_streams(request, operator, body))
    else:
        done = await accepted(_update(request, operator, body))
    answer = Updated(f"Weights updated: {_shown(done)}", done.streams)
    return json_response(answer, headers=ignored.headers)


async def _update(request: Request, operator: AsyncOperator, body: DiskBody) -> Rollout:
    mode: UpdateMode = "keep" if body.flush_cache is False else "recompute"
    return await operator.update_weights(
        body.model_path,
        named(request, body),
        version=body.version,
        mode=mode,
        timeout_s=body.timeout_s or DRAIN_S,
    )


async def _without_streams(request: Request, operator: AsyncOperator, body: DiskBody) -> Rollout:
    """Aborts the live streams, and updates the weights. New streams wait until the update ends."""
    # The version is checked first, because a request with a wrong version must not abort streams.
    _ = body.version
    async with _aborted(request, operator, named(request, body)) as paused:
        done = await _update(request, operator, body)
    done.streams += paused.streams
    return done


@asynccontextmanager
async def _aborted(
    request: Request, operator: AsyncOperator, model: str, timeout_s: float = DRAIN_S
) -> AsyncIterator[Rollout]:
    """Aborts the live streams of a model, and pauses the model until the ``with`` block ends. A
    model that was paused before stays paused."""
    before = await paused_models(request)
    try:
        paused = await accepted(operator.pause(model, mode="abort", timeout_s=timeout_s))
    except TokenbusError:
        # The error may mean only that the workers did not answer in time. The model is then paused,
        # and must be resumed.
        for begun in await paused_models(request):
            if begun not in before and model in ("", begun):
                with suppress(TokenbusError):
                    await operator.resume(begun, timeout_s=timeout_s)
        raise
    try:
        yield paused
    finally:
        if paused.model not in before:
            await operator.resume(model)


async def flush_cache(request: Request) -> Response:
    """Answers that there is nothing to flush, because each block of the KV cache belongs to one
    version of the weights."""
    return json_response(Message("Nothing to flush: requests never use the cache of other weights"))


async def weight_version(request: Request) -> Response:
    """Answers with the version of the weights that all workers with the model have reached."""
    gateway = gateway_of(request)
    info = await gateway.models.info(request.query_params.get("model", ""))
    status = await gateway.client.status()
    loaded = [w.paths[info.name] for w in status.workers if info.name in w.paths] or [info.path]
    oldest = min(loaded, key=lambda path: path.version)
    return json_response(WeightVersion(info.name, weights_label(oldest.version, oldest.weights)))


def _shown(done: Rollout) -> str:
    """The result of an operator's request as a text."""
    return f"{done.model}, version {done.version}, {done.workers} workers, {done.streams} streams"
