"""Two machines, each with a folder of modules, and clients of two tenants."""

from __future__ import annotations

from pathlib import Path

from tokenbus.clients import Client, OwnKey
from tokenbus.protocol.keys import KeyFolder

from ..processes import Bus

TIMEOUT_S = 300.0


class KeyedBus(Bus):
    """A bus with keys. Its client is the operator."""

    def __init__(self, keys: KeyFolder) -> None:
        self._keys = keys
        super().__init__(keys=keys.path, heartbeat_s=0.2)

    def client(self, patience_s: float = 120.0) -> Client:
        """A client of the operator."""
        key = OwnKey.read(self._keys.own("client"))
        return Client(self.front, patience_s=patience_s, key=key)


class Machines:
    """A broker, a GPU worker, a state worker and a controller worker on one machine, a second
    controller worker on another, and clients of two tenants."""

    def __init__(self, bus: Bus, ann: Client, ben: Client) -> None:
        self.bus = bus
        self.ann = ann
        self.ben = ben
        self.second = bus.folder / "second"

    def tokens(self, client: Client, controller: str) -> int:
        """Runs a stream with this controller; returns the number of its tokens."""
        stream = client.generate(
            [40, 41, 42], controller=controller, max_tokens=9, ignore_eos=True, timeout_s=TIMEOUT_S
        )
        [sequence] = stream.wait()
        assert sequence.error is None
        return len(sequence.tokens)

    def files(self, folder: Path) -> set[str]:
        """The modules in a run directory."""
        return {file.stem for file in (folder / "modules/modules").glob("*.wasm")}
