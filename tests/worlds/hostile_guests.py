"""A whole system in which hostile guests run while a well-behaved stream does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from tokenbus.clients import Client, ControllerError, RequestError, TokenbusError
from tokenbus.clients.results import GeneratedSequence

from ..processes import Bus, Process
from ..workers.controller.wasm.hostile.neighbour import Neighbour

INIT_MS = 400.0
"""Shorter than the default, so that these tests are."""
CALM_TOKENS = 12
Made = TypeVar("Made")


class System:
    """A broker, a worker of each role, and a stream that runs while others do."""

    def __init__(self, bus: Bus, worker: Process, client: Client) -> None:
        self.bus, self.worker, self.client = bus, worker, client
        self.neighbour = Neighbour(client, "calm")
        self._calm = self.calm()

    def calm(self) -> list[int]:
        """The tokens of a well-behaved request."""
        return self.run("calm", max_tokens=CALM_TOKENS)[0].tokens

    def run(self, controller: str | bytes, **options: Any) -> list[GeneratedSequence]:
        """A request to its end; a module is uploaded first."""
        name = controller if isinstance(controller, str) else self.upload(controller)
        given = {"max_tokens": 5, "ignore_eos": True, "timeout_s": 300.0, "text": False} | options
        return self.client.generate("x = 1", controller=name, **given).wait()

    def upload(self, wasm: bytes) -> str:
        return self.client.upload_controller(wasm).module

    def undisturbed(self, act: Callable[[], Made]) -> Made:
        """Does it while a well-behaved stream runs: that goes on, and so does the worker."""
        with self.neighbour.running():
            made = act()
        assert self.worker.alive, self.worker.log
        assert self.calm() == self._calm
        return made

    def fails(self, controller: bytes | str, **options: Any) -> TokenbusError:
        """The error that a guest brings to its own client."""
        name = controller if isinstance(controller, str) else self.upload(controller)

        def act() -> TokenbusError:
            with pytest.raises(TokenbusError) as caught:
                self.run(name, **options)
            return caught.value

        return self.undisturbed(act)

    def controller_error(self, controller: bytes | str, **options: Any) -> str:
        """The text of an error that is a controller's own failure."""
        error = self.fails(controller, **options)
        assert type(error) is ControllerError
        assert error.code == "controller_failed"
        assert error.message.isprintable()
        return error.message

    def refusal(self, wasm: bytes) -> RequestError:
        """Why a module is not taken."""

        def act() -> RequestError:
            with pytest.raises(RequestError) as caught:
                self.client.upload_controller(wasm)
            return caught.value

        error = self.undisturbed(act)
        assert type(error) is RequestError
        assert error.path == "$.data"
        return error
