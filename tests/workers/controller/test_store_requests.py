"""The requests to the module store have a bound, which tenants share."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tokenbus.protocol.errors import UnavailableError
from tokenbus.protocol.header import Header
from tokenbus.workers.bus import FromBus
from tokenbus.workers.controller import store_requests
from tokenbus.workers.controller.store_requests import MAX_BYTES, REQUEST_BYTES, StoreRequests

from ...processes import until

BOUND_S = 60.0
UPLOAD_BYTES = 16 * 1024 * 1024


class Store:
    """A module store that handles a request when the test allows it."""

    def __init__(self) -> None:
        self.requests = StoreRequests(self._serve)
        self._may_serve = threading.Semaphore(0)
        self._served = threading.Semaphore(0)

    def add(self, tenant: str, size: int = 0) -> None:
        upload = FromBus(b"UPLOAD", Header(1), b"", [bytes(size)])
        self.requests.add(tenant, upload)

    def serve(self, count: int) -> None:
        """Lets the store handle ``count`` requests, and waits until it has."""
        self._may_serve.release(count)
        for _ in range(count):
            assert self._served.acquire(timeout=BOUND_S)

    def _serve(self, message: FromBus) -> None:
        assert self._may_serve.acquire(timeout=BOUND_S)
        self._served.release()
        raise ValueError("a request that fails frees its bytes too")


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    yield made
    made.requests.close()


def test_a_tenant_with_many_uploads_leaves_room_for_others(store: Store) -> None:
    most = MAX_BYTES // 2 // UPLOAD_BYTES
    for _ in range(most):
        store.add("mallory", UPLOAD_BYTES)
    with pytest.raises(UnavailableError, match="wait for the module store"):
        store.add("mallory", UPLOAD_BYTES)
    store.add("ann", UPLOAD_BYTES)
    store.serve(most + 1)


def test_an_answered_request_frees_its_bytes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_requests, "MAX_BYTES", 4 * REQUEST_BYTES)
    for _ in range(2):
        store.add("mallory")
    with pytest.raises(UnavailableError):
        store.add("mallory")
    store.serve(2)

    def is_added() -> bool:
        try:
            store.add("mallory")
        except UnavailableError:
            return False
        return True

    until(is_added, BOUND_S, "the bytes of an answered request are free")
    store.serve(1)
