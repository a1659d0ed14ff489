"""``Operator``, ``AsyncOperator``: calls that the broker accepts only from an operator."""

from __future__ import annotations

from .async_client import AsyncClient
from .client import Client
from .request_options import DRAIN_S, drain_call, drained_requests


class Operator:
    """The operator's calls of a client. Its key is the operator's, or the broker has no keys.

    with Client() as client:
        Operator(client).drain_worker("gpu-0")
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def drain_worker(self, name: str, *, timeout_s: float = DRAIN_S) -> int:
        """Drains the worker of this name and waits for its end; returns the number of requests that
        it had. Other workers continue the streams; if no other worker can, this worker finishes
        them. Raises RequestError if the client is not the operator."""
        return drained_requests(self._client.ask(drain_call(name, timeout_s)))


class AsyncOperator:
    """The operator's calls of an asyncio client; see ``Operator``."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def drain_worker(self, name: str, *, timeout_s: float = DRAIN_S) -> int:
        """Drains the worker of this name; see ``Operator.drain_worker``."""
        return drained_requests(await self._client.ask(drain_call(name, timeout_s)))
