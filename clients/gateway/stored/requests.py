"""``/v1/responses``: answers a conversation, and lists, cancels and deletes stored responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ....protocol.decoders import convert, json_decoder
from ..bodies.reading import check_json, decode_in_turn, ignored_of, read_bytes
from ..bodies.wrong_values import refusal
from ..context import gateway_of
from ..errors import ApiError, invalid_field
from ..events import EventStream
from ..generation.respond import respond
from ..json import json_response
from ..openai.response_bodies import ResponseAnswer, ResponsesRequest
from ..openapi import Operation
from ..users.turns import current_user
from .background import PATH, adopt, background_response, stored_events
from .database import ContextTooLargeError, Database, NotStoredError, Stored
from .saving import SavedJob, check_copied

ONE = f"{PATH}/{{id}}"
EventNumber = Annotated[int, Meta(ge=-1, le=2**53)]
PageLimit = Annotated[int, Meta(ge=1, le=100)]
Order = Literal["asc", "desc"]

Q = TypeVar("Q", bound=Struct)


class DeletedResponse(Struct):
    """The answer of ``DELETE /v1/responses/{id}``."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItemList(Struct):
    """The answer of ``GET /v1/responses/{id}/input_items``."""

    data: list[Any]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"


class Events(Struct):
    """The query of ``GET /v1/responses/{id}``."""

    stream: bool = False
    starting_after: EventNumber = -1
    """The number of the last event that the client has received."""


class Page(Struct):
    """The query of ``GET /v1/responses/{id}/input_items``."""

    after: str | None = None
    limit: PageLimit = 20
    order: Order = "desc"


def routes() -> list[BaseRoute]:
    """The routes of responses."""
    return [
        Route(PATH, responses, methods=["POST"]),
        Route(ONE, response, methods=["GET"]),
        Route(ONE, delete_response, methods=["DELETE"]),
        Route(f"{ONE}/cancel", cancel_response, methods=["POST"]),
        Route(f"{ONE}/input_items", input_items, methods=["GET"]),
    ]


def operations() -> list[Operation]:
    """The operations for the OpenAPI document."""
    events = {"stream": bool, "starting_after": EventNumber}
    pages = {"after": str, "limit": PageLimit, "order": Order}
    answer, items = ResponseAnswer, InputItemList
    return [
        Operation(
            "post", PATH, "Answers a conversation", "OpenAI", ResponsesRequest, answer, stream=True
        ),
        Operation("get", ONE, "A stored response", "OpenAI", None, answer, True, query=events),
        Operation("delete", ONE, "Deletes a response", "OpenAI", None, DeletedResponse),
        Operation("post", f"{ONE}/cancel", "Cancels a response", "OpenAI", None, answer),
        Operation(
            "get",
            f"{ONE}/input_items",
            "The input of a response",
            "OpenAI",
            None,
            items,
            query=pages,
        ),
    ]


async def responses(request: Request) -> Response:
    """Answers with a response, as one object or as a stream of events."""
    ignored = ignored_of(request)
    check_json(request)
    data = await read_bytes(request)
    gateway = gateway_of(request)
    body = await decode_in_turn(gateway, data, ResponsesRequest, ignored)
    body.check()
    body.check_include(ignored)
    check_copied(body, len(data), ignored)
    if body.background:
        return await background_response(request, data, body, ignored)
    work = SavedJob.begin(gateway, body, ignored)
    return await respond(request, work, ignored, stream=body.stream)


async def response(request: Request) -> Response:
    """Answers with a stored response, or with its events after ``starting_after``."""
    query = _query(request, Events)
    gateway = gateway_of(request)
    found = await _found(request)
    await adopt(gateway, found)
    if not query.stream:
        gateway.shares.take_bytes(len(found.answer))
        return json_response(msgspec.Raw(found.answer))
    if not found.background:
        raise invalid_field(
            "stream",
            f"the events of {found.id!r} are not stored, because it is not a response in the "
            "background; leave out stream",
        )
    return EventStream(stored_events(gateway, found.id, query.starting_after))


async def delete_response(request: Request) -> Response:
    """Deletes a stored response, and cancels it if it is not finished."""
    stored = gateway_of(request).stored
    id = request.path_params["id"]
    if not await stored.call(lambda database, user: database.delete(user, id)):
        raise _not_found(id)
    stored.running.cancel(current_user.get(), id)
    return json_response(DeletedResponse(id))


async def cancel_response(request: Request) -> Response:
    """Cancels a response in the background. A finished response does not change."""
    stored = gateway_of(request).stored
    found = await _found(request)
    if not found.background:
        raise ApiError(
            400,
            f"{found.id!r} is not a response in the background; close the connection to cancel "
            "another response",
            code="invalid_request",
        )
    cancelled = await stored.call(lambda database, user: database.cancel(user, found.id))
    if cancelled is None:
        raise _not_found(found.id)
    stored.running.cancel(current_user.get(), found.id)
    return json_response(msgspec.Raw(cancelled.answer))


async def input_items(request: Request) -> Response:
    """Answers with a page of the input of a stored response. The input begins with the items of the
    earlier responses that the response continues; the order ``desc`` reverses the input."""
    page = _query(request, Page)
    found = await _found(request)
    stored = gateway_of(request).stored
    answer = await stored.call(
        lambda database, user: page_of(page, _input_of(database, user, found))
    )
    gateway_of(request).shares.take_bytes(sum(len(memoryview(item)) for item in answer.data))
    return json_response(answer)


def _input_of(database: Database, user: str, response: Stored) -> list[bytes]:
    given = database.given(user, response.id)
    if response.previous is None:
        return given
    try:
        return [*database.context(user, response.previous), *given]
    except (NotStoredError, ContextTooLargeError):
        # An earlier response was deleted, or the earlier responses are too large together.
        return given


class _Identified(Struct):
    """The field of an item by which pages are found. Other fields are not decoded, because an input
    may have 65,536 values."""

    id: str


_id_of = json_decoder(_Identified).decode


def page_of(page: Page, items: list[bytes]) -> InputItemList:
    """The items of a page, unchanged. ``items``: the items of the input as JSON, oldest first.
    Raises ApiError 400 if ``after`` is not the id of an item."""
    items = items[::-1] if page.order == "desc" else items
    ids = [_id_of(data).id for data in items]
    if page.after is not None:
        if page.after not in ids:
            raise invalid_field("after", f"the input has no item {page.after!r}")
        begin = ids.index(page.after) + 1
        ids, items = ids[begin:], items[begin:]
    shown = items[: page.limit]
    return InputItemList(
        [msgspec.Raw(data) for data in shown],
        len(items) > len(shown),
        ids[0] if shown else None,
        ids[len(shown) - 1] if shown else None,
    )


async def _found(request: Request) -> Stored:
    id = request.path_params["id"]
    stored = gateway_of(request).stored
    found = await stored.call(lambda database, user: database.find(user, id))
    if found is None:
        raise _not_found(id)
    return found


def _query(request: Request, kind: type[Q]) -> Q:
    given = dict(request.query_params)
    try:
        return convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise refusal(error, kind, lambda: given) from None


def _not_found(id: str) -> ApiError:
    return ApiError(
        404,
        f"the response {id!r} is not stored: it was deleted, or dropped to make room, or belongs "
        "to another API key",
        code="response_not_found",
    )
