"""Requests and fixtures that the tests of the OpenAI-compatible interface share."""

from __future__ import annotations

from typing import Any

import openai

from ...processes import Gateway

MODEL = "embedded"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"enum": ["Bern", "Rome"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
HELLO: Any = [{"role": "user", "content": "hello"}]
ECHO_TEMPLATE = "{{ messages[0].content }}"


def openai_client(gateway: Gateway) -> openai.OpenAI:
    """A client of the openai package for a gateway."""
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=300.0)


def receipt(answer: Any) -> dict[str, Any]:
    """The receipt (``tokenbus``) of a choice, a chunk's choice or a response, without ``exact``."""
    found = (answer.model_extra or {}).get("tokenbus", {})
    assert isinstance(found, dict)
    return {name: value for name, value in found.items() if name != "exact"}
