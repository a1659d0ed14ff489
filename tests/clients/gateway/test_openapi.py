"""The OpenAPI document is valid and complete. No request gets a status of 500 or more, whether the
document allows the request or not. Only health checks may answer 503."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from schemathesis import Case
from schemathesis.core.errors import InvalidSchema
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.schemas import OpenApiSchema
from starlette.routing import Route
from tokenbus.clients.gateway.app import routes

from ...counts import examples
from ...processes import Gateway
from .openai_requests import MODEL

pytestmark = pytest.mark.process

SECONDS = 300.0
ROOT = Path(__file__).parents[3]
PAGES = ("http", "anthropic", "aici", "rollouts")
HEALTH = ("/ready", "/health", "/health_generate")
UNDOCUMENTED = {"/", "/openapi.json"}
"""Paths that the document does not have: the WebSocket's path and the document's own."""
FEW = {
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "n_predict": 2,
    "num_predict": 2,
    "max_new_tokens": 2,
    "n": 2,
    "best_of": 2,
    "top_logprobs": 3,
}
"""Maximum values of fields that cost time. Other tests check large values."""
REST = -1
"""The value of a maximum number of tokens that stands for the rest of the context."""

LIMITS = {
    "/v1/chat/completions": "max_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/run": "max_tokens",
    "/completion": "n_predict",
    "/completions": "n_predict",
    "/api/chat": "options.num_predict",
    "/api/generate": "options.num_predict",
    "/generate": "sampling_params.max_new_tokens",
}
"""For each path, the field that bounds an answer's tokens. Without the field, answers are long."""
CONTRADICTORY = {
    "controller",
    "controller_arg",
    "structured_outputs",
    "response_format",
    "suffix",
    "best_of",
    "previous_response_id",
    "conversation",
    "tool_choice",
    "chat_template",
    "continue_final_message",
}
"""Fields that are refused with most values, or in combination with other fields."""


@pytest.fixture(scope="module")
def schema(gateway: Gateway) -> OpenApiSchema:
    found = schemathesis.openapi.from_url(f"{gateway.url}/openapi.json")
    assert isinstance(found, OpenApiSchema)
    return found


def test_the_document_is_valid_and_has_every_path(gateway: Gateway, schema: OpenApiSchema) -> None:
    schema.validate()
    document = httpx.get(f"{gateway.url}/openapi.json", timeout=300).json()
    described = {
        (path, method.upper()) for path, one in document["paths"].items() for method in one
    }
    served = {
        (route.path.replace(":path", ""), method)
        for route in routes()
        if isinstance(route, Route) and not route.path.startswith(("/console", "/chat/"))
        for method in (route.methods or set()) - {"HEAD"}
        if route.path not in UNDOCUMENTED
    }
    assert described == served


def test_the_pages_name_every_field_of_every_body(gateway: Gateway) -> None:
    page = "".join((ROOT / "docs" / f"{name}.md").read_text() for name in PAGES)
    document = httpx.get(f"{gateway.url}/openapi.json", timeout=300).json()
    todo: list[Any] = [
        one["requestBody"]
        for path in document["paths"].values()
        for one in path.values()
        if "requestBody" in one
    ]
    seen: set[str] = set()
    fields: set[str] = set()
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            reference = node.get("$ref", "")
            if reference and reference not in seen:
                seen.add(reference)
                todo.append(document["components"]["schemas"][reference.rpartition("/")[2]])
            fields |= set(node.get("properties", {}))
            todo += [value for name, value in node.items() if name != "discriminator"]
    assert len(fields) > 90
    assert {name for name in fields if f"`{name}`" not in page} == set()


def test_no_request_makes_the_gateway_fail(gateway: Gateway, schema: OpenApiSchema) -> None:
    results = list(schema.get_all_operations())
    operations = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(operations) == len(results)
    assert len(operations) > 15
    with httpx.Client(base_url=gateway.url, timeout=SECONDS) as client:
        for operation in operations:
            try_cases(operation.as_strategy(generation_mode=GenerationMode.POSITIVE), client)
            if any(body.media_type == "application/json" for body in operation.body):
                try_cases(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), client)


def try_cases(cases: st.SearchStrategy[Case], client: httpx.Client) -> None:
    """Sends random requests, and checks that none gets a status of 500 or more, except a 503 of
    a health check."""

    @settings(
        max_examples=examples(8),
        phases=[Phase.explicit, Phase.generate],
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data(), plain=st.booleans())
    def check(data: st.DataObject, plain: bool) -> None:
        try:
            case = data.draw(cases)
        except InvalidSchema:
            # Schemathesis cannot generate a value for some schemas that it has chosen itself.
            reject()
        sent = case.as_transport_kwargs(base_url=str(client.base_url))
        body = sent.get("json")
        if isinstance(body, dict):
            body = plausible(body) if plain else body
            body = cheaper(body, case.operation.path)
        answer = client.request(
            sent["method"],
            sent["url"],
            params=sent.get("params"),
            headers=sent.get("headers"),
            content=sent.get("data"),
            json=body,
        )
        if answer.status_code == 503 and sent["url"].endswith(HEALTH):
            return  # The broker did not answer for two seconds.
        assert answer.status_code < 500, (answer.status_code, answer.text, sent)
        if answer.status_code >= 400:
            assert answer.headers["content-type"] == "application/json"
            assert answer.json()

    check()


def plausible(body: dict[str, Any]) -> dict[str, Any]:
    """The body without fields that are often refused, and with a valid model and valid tokens."""
    found = {name: value for name, value in body.items() if name not in CONTRADICTORY}
    if "model" in found:
        found["model"] = MODEL
    for name in ("prompt", "tokens"):
        if isinstance(ids := found.get(name), list):
            found[name] = [i % 1000 if isinstance(i, int | float) else i for i in ids]
    return found


def cheaper(body: dict[str, Any], path: str) -> dict[str, Any]:
    """The body with smaller maximum values, so that less is generated."""
    found = dict(body)
    for name, most in FEW.items():
        value = found.get(name)
        if isinstance(value, int | float) and (value > most or value == REST):
            found[name] = most
    if path not in LIMITS or "max_completion_tokens" in found:
        return found
    limit, _, inner = LIMITS[path].partition(".")
    if not inner and found.get(limit) is None:
        found[limit] = FEW[limit]
    elif inner and isinstance(options := found.get(limit) or {}, dict):
        value = options.get(inner)
        endless = value is None or (isinstance(value, int) and value < 0)
        found[limit] = cheaper(options | ({inner: FEW[inner]} if endless else {}), "")
    return found
