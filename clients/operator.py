"""``Operator``, ``AsyncOperator``: calls that the broker accepts only from an operator."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

from ..protocol.messages import PauseMode, Rollout, UpdateMode
from .async_client import AsyncClient
from .async_client import answer_to as async_answer_to
from .client import Client, answer_to
from .request_options import (
    DRAIN_S,
    drain_call,
    drained_requests,
    file_call,
    part_call,
    pause_call,
    resume_call,
    rollout_of,
    update_call,
)
from .weights_content import SHARED, Weights, opened


class Operator:
    """Sends the messages that only an operator may send. If the broker has keys, the client must
    have the operator's key.

    with Client() as client:
        Operator(client).drain_worker("gpu-0")
    """

    def __init__(self, client: Client) -> None:
        self._client = client

    def drain_worker(self, name: str, *, timeout_s: float = DRAIN_S) -> int:
        """Drains the worker of this name, and returns when the worker has left. Returns the number
        of requests that the worker had. Other workers continue its streams. If no other worker can
        continue a stream, this worker finishes it. Raises RequestError if the client is not the
        operator, or if no worker has this name."""
        return drained_requests(self._client.ask(drain_call(name, timeout_s)))

    def pause(
        self, model: str = "", *, mode: PauseMode = "keep", timeout_s: float = DRAIN_S
    ) -> Rollout:
        """Pauses a model: streams that begin later wait for ``resume``. ``mode``: with ``keep``,
        live streams stop. With ``wait``, they run to their ends before this call returns. With
        ``abort``, they end as ``cancelled``."""
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
        """Replaces the weights of a model by the safetensors files in a folder. If one worker
        cannot read them, no worker changes its weights. Live streams continue with the new weights.
        ``mode``: whether their KV cache is computed again (``recompute``) or kept (``keep``).
        ``version``: the number of the new weights, above the current number; 0: the next number.
        ``timeout_s``: if a worker has not read the files after this number of seconds, the update
        fails."""
        return rollout_of(self._client.ask(update_call(folder, model, version, mode, timeout_s)))

    def send_weights(
        self,
        weights: Weights,
        model: str = "",
        *,
        version: int = 0,
        mode: UpdateMode = "recompute",
        timeout_s: float = DRAIN_S,
    ) -> Rollout:
        """Like ``update_weights``, but sends the weights over the bus. ``weights``: the content of
        a safetensors file, for example the result of ``safetensors.torch.save``, or the path of
        such a file on this machine. The file must not change during this call."""
        with opened(weights) as content:
            update = self._client.begin(file_call(content, model, version, mode, timeout_s))
            for offset, part in content.parts():
                self._client.ask(part_call(content, offset, part, timeout_s))
        return rollout_of(answer_to(update))

    def share_weights(
        self,
        name: str,
        model: str = "",
        *,
        version: int = 0,
        mode: UpdateMode = "recompute",
        timeout_s: float = DRAIN_S,
    ) -> Rollout:
        """Like ``update_weights``, but the weights are in POSIX shared memory with this name, as
        one safetensors file. This program and all workers of the model must run on one machine. The
        memory may be removed after this call."""
        with opened(SHARED / name) as content:
            call = file_call(content, model, version, mode, timeout_s, shared=name)
            return rollout_of(self._client.ask(call))


class AsyncOperator:
    """The operator's calls for an asyncio client; see ``Operator``."""

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

    async def send_weights(
        self,
        weights: Weights,
        model: str = "",
        *,
        version: int = 0,
        mode: UpdateMode = "recompute",
        timeout_s: float = DRAIN_S,
    ) -> Rollout:
        """Sends new weights over the bus; see ``Operator.send_weights``."""
        with ExitStack() as stack:
            content = await asyncio.to_thread(stack.enter_context, opened(weights))
            update = self._client.begin(file_call(content, model, version, mode, timeout_s))
            for offset, part in content.parts():
                await self._client.ask(part_call(content, offset, part, timeout_s))
        return rollout_of(await async_answer_to(update))

    async def share_weights(
        self,
        name: str,
        model: str = "",
        *,
        version: int = 0,
        mode: UpdateMode = "recompute",
        timeout_s: float = DRAIN_S,
    ) -> Rollout:
        """Uses new weights in shared memory; see ``Operator.share_weights``."""
        with ExitStack() as stack:
            content = await asyncio.to_thread(stack.enter_context, opened(SHARED / name))
            call = file_call(content, model, version, mode, timeout_s, shared=name)
            return rollout_of(await self._client.ask(call))
