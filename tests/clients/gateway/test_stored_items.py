"""Items of earlier responses, to which later inputs refer."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from tokenbus.clients.gateway import stored_items
from tokenbus.clients.gateway.errors import ApiError
from tokenbus.clients.gateway.stored_items import StoredItems

from ...processes import Gateway
from .openai_requests import MODEL


def reference(id: str) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": id}]


def test_an_item_belongs_to_its_user() -> None:
    stored = StoredItems()
    stored.store("a", {"1": b'{"x":1}'})
    assert stored.resolved("a", reference("1")) == [{"x": 1}]
    cut: list[dict[str, Any]] = [
        {"type": "reasoning", "id": "1", "summary": [], "content": [{"text": ""}]}
    ]
    assert stored.resolved("a", cut) == [{"x": 1}]
    for given in (cut, [{**cut[0], "id": [1]}]):
        assert stored.resolved("b", given) == given
    whole = [{"type": "reasoning", "id": "1", "summary": [{"type": "summary_text", "text": "t"}]}]
    assert stored.resolved("a", whole) == whole
    for user, id in (("b", "1"), ("a", "2")):
        with pytest.raises(ApiError, match="is not stored"):
            stored.resolved(user, reference(id))


def test_the_oldest_items_of_the_largest_user_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_items, "MAX_BYTES", 5 * 600)
    monkeypatch.setattr(stored_items, "MAX_BYTES_OF_ONE", 4 * 600)
    stored = StoredItems()
    item = b'"%s"' % (b"x" * 80)
    stored.store("small", {"s": item})
    for number in range(9):
        stored.store("large", {str(number): item})
    assert stored.resolved("small", reference("s"))
    assert stored.resolved("large", reference("8"))
    with pytest.raises(ApiError):
        stored.resolved("large", reference("4"))


def test_references_to_one_large_item_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    item = b'"%s"' % (b"x" * 80)
    monkeypatch.setattr(stored_items, "MAX_RESOLVED_BYTES", 3 * len(item))
    stored = StoredItems()
    stored.store("a", {"1": item})
    assert len(stored.resolved("a", reference("1") * 3)) == 3
    with pytest.raises(ApiError, match="together; refer to each item only once") as refused:
        stored.resolved("a", reference("1") * 4)
    assert refused.value.param == "input[3].id"


@pytest.mark.process
def test_an_input_may_refer_to_an_item_unless_it_was_not_stored(gateway: Gateway) -> None:
    def post(input: Any, **more: Any) -> httpx.Response:
        body = {"model": MODEL, "input": input, "max_output_tokens": 4, "temperature": 0, **more}
        return httpx.post(f"{gateway.url}/v1/responses", json=body, timeout=300)

    first = post("hello").json()
    assert first["store"] is True
    [item] = first["output"]
    asked = {"role": "user", "content": "hello"}
    more = {"role": "user", "content": "more"}
    referred = post([asked, *reference(item["id"]), more]).json()
    sent = post([asked, item, more]).json()
    assert referred["usage"]["input_tokens"] == sent["usage"]["input_tokens"]
    unstored = post("hello", store=False).json()
    assert unstored["store"] is False
    refused = post([asked, *reference(unstored["output"][0]["id"])])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1].id")
