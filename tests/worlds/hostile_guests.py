"""A system in which hostile guests run at the same time as a well-behaved stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from tokenbus.clients import Client, ControllerError, RequestError, TokenbusError
from tokenbus.clients.results import GeneratedSequence

from ..processes import Bus, Process
from ..workers.controller.wasm.hostile.neighbour import Neighbour

INIT_MS = 400.0
"""The setting ``controller_init_ms``. It is below the default, which shortens these tests."""
CALM_TOKENS = 12
Made = TypeVar("Made")


class System:
    """A broker, a GPU worker, a state worker, a controller worker (``worker``), and a client."""

    def __init__(self, bus: Bus, worker: Process, client: Client) -> None:
        self.bus, self.worker, self.client = bus, worker, client
        self.neighbour = Neighbour(client, "calm")
        self._calm = self.calm()

    def calm(self) -> list[int]:
        """Runs a well-behaved request; returns its tokens."""
        return self.run("calm", max_tokens=CALM_TOKENS)[0].tokens

    def run(self, controller: str | bytes, **options: Any) -> list[GeneratedSequence]:
        """Runs a request to its end. If ``controller`` is a module, the client uploads it first."""
        name = controller if isinstance(controller, str) else self.upload(controller)
        given = {"max_tokens": 5, "ignore_eos": True, "timeout_s": 550.0, "text": False} | options
        return self.client.generate("x = 1", controller=name, **given).wait()

    def upload(self, wasm: bytes) -> str:
        return self.client.upload_controller(wasm).module

    def undisturbed(self, act: Callable[[], Made]) -> Made:
        """Calls ``act`` during well-behaved streams. Checks that these streams and the worker
        continue, and that a well-behaved request then has the same tokens as at the beginning."""
        with self.neighbour.running():
            made = act()
        assert self.worker.alive, self.worker.log
        assert self.calm() == self._calm
        return made

    def fails(self, controller: bytes | str, **options: Any) -> TokenbusError:
        """Runs a guest, which must fail; returns the error that its client receives."""
        name = controller if isinstance(controller, str) else self.upload(controller)

        def act() -> TokenbusError:
            with pytest.raises(TokenbusError) as caught:
                self.run(name, **options)
            return caught.value

        return self.undisturbed(act)

    def controller_error(self, controller: bytes | str, **options: Any) -> str:
        """Runs a guest, which must fail; returns the text of its error ``controller_failed``."""
        error = self.fails(controller, **options)
        assert type(error) is ControllerError
        assert error.code == "controller_failed"
        assert error.message.isprintable()
        return error.message

    def refusal(self, wasm: bytes) -> RequestError:
        """Uploads a module, which must be refused; returns the error."""

        def act() -> RequestError:
            with pytest.raises(RequestError) as caught:
                self.client.upload_controller(wasm)
            return caught.value

        error = self.undisturbed(act)
        assert type(error) is RequestError
        assert error.path == "$.data"
        return error
