"""The state of a model's new weights, from the broker's order until they replace the model's old
weights."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....protocol.messages import UpdateMode
from ....protocol.worker_messages import Order
from ..engine.engine import Engine
from ..model.new_weights import NewWeights, WeightsError, read_received, read_weights
from ..model.weights_file import ReceivedFile, copied_from_shared
from .weights_exchange import Incoming


@dataclass(slots=True, eq=False)
class Reading:
    """Weights that are being read, or that have been read and wait to replace the old weights."""

    model: str
    engine: Engine
    version: int
    folder: str
    """The folder of the weights; empty if the weights are not in a folder."""
    mode: UpdateMode = "recompute"
    prepare: tuple[Order, int] | None = None
    """The order to read the weights, which is answered when they have been read, and the link over
    which it arrived."""
    commits: list[tuple[Order, int]] = field(default_factory=list)
    """The orders that are answered when the weights have replaced the old weights, each with its
    link."""
    committed: bool = False
    """Whether the broker has made these weights the model's current weights. If so, they replace
    the old weights as soon as they have been read."""
    read: NewWeights | None = None
    link: int = -1
    """The link of ``prepare``."""
    weights: str = ""
    """The hash that the weights must have; empty if it is not known."""
    sha256: str = ""
    """SHA-256 of the file that the operator sends or shares; empty for other weights."""
    shared: str = ""
    size: int = 0
    """``shared``: the name of the shared memory that has the file; empty without shared memory.
    ``size``: the size of the file in bytes."""
    incoming: Incoming | None = None
    """The transfer over the bus; None if no transfer runs."""
    attempts: int = 0
    """How often the worker has begun to receive the weights from another worker after an error."""
    received: ReceivedFile | None = None
    """The file that has arrived over the bus."""

    def load(self) -> NewWeights:
        """Reads the weights. Raises WeightsError."""
        loaded, file = self.engine.loaded, self.received
        if self.shared:
            file = copied_from_shared(loaded, self.shared, self.size)
        if file is not None:
            if self.sha256 and file.sha256 != self.sha256:
                raise WeightsError(f"the weights do not have the sha256 {self.sha256}")
            source = f"the shared memory {self.shared!r}" if self.shared else "the bus"
            found = read_received(loaded, file.path, self.version, source)
        else:
            found = read_weights(loaded, self.folder, self.version)
        if self.weights and found.weights != self.weights:
            raise WeightsError(
                f"the weights from {found.source} have the hash {found.weights}; expected "
                f"{self.weights}, the hash of version {self.version}"
            )
        return found
