"""The transfer of a model's weights to a GPU worker, through the broker. The current weights come
from another worker, and new weights come from the operator.

The receiving worker requests one part at a time. The sending worker sends at most one part in each
pass of its loop. So a transfer delays the tokens of a step by at most the time for one part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from ....protocol.bodies import encode_body
from ....protocol.header import encode_header
from ....protocol.messages import WEIGHTS_PART_BYTES
from ....protocol.worker_messages import FetchWeights, WeightsPart
from ..model.loader import LoadedModel
from ..model.models import Models
from ..model.new_weights import WeightsError
from ..model.weights_file import ReceivedFile, WeightsFile
from .streams import Frames

log = logging.getLogger(__name__)

AGAIN_S = 2.0
"""If a part has not arrived after this number of seconds, it is requested again. If several workers
have the weights, it is requested from another worker."""
KEPT_S = 30.0
"""The description of a sent file is dropped when no part was sent for this number of seconds."""


class Sender:
    """Answers the FETCH_WEIGHTS of other workers. ``post`` sends frames over a link. ``wake`` makes
    the next pass of the loop begin at once."""

    def __init__(
        self, models: Models, post: Callable[[Frames, int], None], wake: Callable[[], None]
    ) -> None:
        self._models = models
        self._post = post
        self._wake = wake
        self._asked: dict[tuple[int, int], FetchWeights] = {}
        """The last unanswered request of each worker, by link and address."""
        self._file: WeightsFile | None = None
        self._sent_at = 0.0

    def add(self, fetch: FetchWeights, address: int, link: int) -> None:
        """Adds the request of the worker ``address``."""
        self._asked[link, address] = fetch

    def act(self) -> None:
        """Sends one part."""
        now = time.monotonic()
        if not self._asked:
            if self._file is not None and now - self._sent_at > KEPT_S:
                self._file = None
            return
        self._sent_at = now
        link, address = next(iter(self._asked))
        fetch = self._asked.pop((link, address))
        part = WeightsPart(model=fetch.model, weights=fetch.weights, offset=fetch.offset)
        content: list[bytes] = []
        try:
            file = self._file_of(fetch)
        except WeightsError as error:
            part.error, file = str(error), None
        if file is not None:
            part.size = file.size
            content = [file.read(fetch.offset, WEIGHTS_PART_BYTES)]
        elif not part.error:
            part.error = f"the worker does not have these weights of {fetch.model}"
        body = encode_body(part, "msgpack")
        self._post([b"WEIGHTS_PART", encode_header(0, address), body, *content], link)
        if self._asked:
            self._wake()

    def _file_of(self, fetch: FetchWeights) -> WeightsFile | None:
        """The file with the requested weights; None if the model has other weights."""
        engine = self._models.engines.get(fetch.model)
        if engine is None or engine.loaded.weights != fetch.weights:
            return None
        if self._file is None or self._file.weights != fetch.weights:
            self._file = WeightsFile(engine.loaded)
        return self._file


class Incoming:
    """The weights of a model that arrive in parts. ``fetch``: the request for the first part.
    ``send`` sends frames to one of the brokers; a number selects the broker. ``file``: the file for
    the weights, if their size is known."""

    def __init__(
        self,
        loaded: LoadedModel,
        fetch: FetchWeights,
        send: Callable[[Frames, int], None],
        file: ReceivedFile | None = None,
    ) -> None:
        self._loaded = loaded
        self._send = send
        self._fetch = fetch
        self._asked_at = time.monotonic()
        self._logged = ""
        self.file = file
        """The file with the parts that have arrived; None until its size is known."""

    @property
    def weights(self) -> str:
        """``FetchWeights.weights`` of all requests."""
        return self._fetch.weights

    def ask(self) -> None:
        """Requests the next part."""
        self._asked_at = time.monotonic()
        self._fetch.offset = self.file.offset if self.file is not None else 0
        body = encode_body(self._fetch, "msgpack")
        self._send([b"FETCH_WEIGHTS", encode_header(), body], self._fetch.turn)

    def ask_again(self) -> None:
        """If the next part has not arrived for ``AGAIN_S``, requests it from another worker."""
        if time.monotonic() - self._asked_at > AGAIN_S:
            self._fetch.turn += 1
            self.ask()

    def take(self, part: WeightsPart, content: Sequence[bytes]) -> bool:
        """Takes a part, and requests the next one. Returns whether all parts have arrived. Ignores
        parts that were not requested or were already received.

        Raises WeightsError if the file cannot be received.
        """
        if part.error:
            if part.error != self._logged:
                log.warning("%s; trying again every %.0f s", part.error, AGAIN_S)
            self._logged = part.error
            return False
        if part.offset != (self.file.offset if self.file is not None else 0):
            return False
        if self.file is None:
            self.file = ReceivedFile(self._loaded, part.size)
        if len(content) != 1 or not content[0] or part.size != self.file.size:
            raise WeightsError("a part of another file has arrived")
        self.file.add(content[0])
        if self.file.complete:
            return True
        self.ask()
        return False
