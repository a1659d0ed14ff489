"""``Operator``, ``AsyncOperator``: calls that the broker accepts only from an operator."""

from __future__ import annotations

from pathlib import Path

from ..protocol.messages import PauseMode, Rollout, UpdateMode
from .async_client import AsyncClient
from .client import Client
from .request_options import (
    DRAIN_S,
    drain_call,
    drained_requests,
    pause_call,
    resume_call,
    rollout_of,
    update_call,
)


class Operator:
    """The operator's calls, for a client that has the operator's key or uses a broker without keys.

    with Client() as client:
        Operator(client).drain_worker("gpu-0")
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def drain_worker(self, name: str, *, timeout_s: float = DRAIN_S) -> int:
        """Drains the worker of this name and waits for its end; returns the number of requests that
        the worker had. Other workers continue the streams; if no other worker can, this worker
        finishes them. Raises RequestError if the client is not the operator, or if no worker has
        this name."""
        return drained_requests(self._client.ask(drain_call(name, timeout_s)))

    def pause(
        self, model: str = "", *, mode: PauseMode = "keep", timeout_s: float = DRAIN_S
    ) -> Rollout:
        """Pauses a model: streams that begin later wait for ``resume``. ``mode``: whether live
        streams stop (``keep``), are finished first (``wait``) or end as ``cancelled``
        (``abort``)."""
        return rollout_of(self._client.ask(pause_call(model, mode, timeout_s)))

    def resume(self, model: str = "", *, timeout_s: float = DRAIN_S) -> Rollout:
        """Ends the pause of a model."""
        return rollout_of(self._client.ask(resume_call(model, timeout_s)))

    def update_weights(
        self,
        folder: str | Path,
        model: str = "",
        *,
        version: int = 0,
        mode: UpdateMode = "recompute",
        timeout_s: float = DRAIN_S,
    ) -> Rollout:
        """Replaces the weights of a model by those of a folder of safetensors files, at all workers
        or at none. Live streams continue with the new weights. ``mode``: whether their KV cache is
        computed again (``recompute``) or kept (``keep``). ``version``: the number of the new
        weights, above the current number; 0: the next number. ``timeout_s``: seconds after which
        the update fails if a worker has not read the files."""
        return rollout_of(self._client.ask(update_call(folder, model, version, mode, timeout_s)))


class AsyncOperator:
    """The operator's calls of an asyncio client; see ``Operator``."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def drain_worker(self, name: str, *, timeout_s: float = DRAIN_S) -> int:
        """Drains the worker of this name; see ``Operator.drain_worker``."""
        return drained_requests(await self._client.ask(drain_call(name, timeout_s)))

    async def pause(
        self, model: str = "", *, mode: PauseMode = "keep", timeout_s: float = DRAIN_S
    ) -> Rollout:
        """Pauses a model; see ``Operator.pause``."""
        return rollout_of(await self._client.ask(pause_call(model, mode, timeout_s)))

    async def resume(self, model: str = "", *, timeout_s: float = DRAIN_S) -> Rollout:
        """Ends the pause of a model."""
        return rollout_of(await self._client.ask(resume_call(model, timeout_s)))

    async def update_weights(
        self,
        folder: str | Path,
        model: str = "",
        *,
        version: int = 0,
        mode: UpdateMode = "recompute",
        timeout_s: float = DRAIN_S,
    ) -> Rollout:
        """Replaces the weights of a model; see ``Operator.update_weights``."""
        call = update_call(folder, model, version, mode, timeout_s)
        return rollout_of(await self._client.ask(call))
