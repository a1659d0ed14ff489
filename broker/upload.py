"""Checks the source of the weights of an UPDATE_WEIGHTS, and receives weights that the operator
sends in parts."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from ..protocol.bodies import encode_body
from ..protocol.errors import Code, RequestError
from ..protocol.header import encode_header
from ..protocol.messages import WEIGHTS_PART_BYTES, SendWeights, UpdateWeights
from ..protocol.worker_messages import Order, WeightsPart

SHARED_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", re.ASCII)
SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(slots=True, eq=False)
class Upload:
    """A file of weights that the operator sends in parts. At most one part waits at the broker."""

    size: int
    sha256: str
    offset: int = 0
    """Number of bytes that were passed to the workers."""
    ready: set[int] = field(default_factory=set)
    """Ids of the workers that have requested the next part."""
    part: bytes = b""
    """The part that waits until all workers have requested it; empty if no part waits."""
    stream_id: int = 0
    """The ``stream_id`` of the WEIGHTS with this part."""

    def add(self, message: SendWeights, part: bytes) -> None:
        """Adds a part. Raises RequestError if the previous part still waits, if the part does not
        continue the file, or if its size is wrong."""
        if self.part or message.offset != self.offset:
            raise RequestError(
                Code.INVALID_FIELD,
                f"this part begins at byte {message.offset}; expected the part from byte "
                f"{self.offset + len(self.part)} on, after the answer to the previous part",
                path="$.offset",
            )
        most = min(self.size - self.offset, WEIGHTS_PART_BYTES)
        if not 0 < len(part) <= most:
            raise RequestError(
                Code.TOO_LARGE, f"the attachment has {len(part)} bytes; expected 1 to {most}"
            )
        self.part, self.stream_id = part, message.stream_id

    def frames(self, order: Order) -> tuple[bytes, ...]:
        """The WEIGHTS_PART with the part that waits."""
        body = WeightsPart(
            model=order.model, weights=self.sha256, offset=self.offset, size=self.size
        )
        return b"WEIGHTS_PART", encode_header(), encode_body(body, "msgpack"), self.part

    def passed_on(self) -> int:
        """Call this method when the part was passed to the workers. Returns the number of bytes
        that were passed so far."""
        self.offset += len(self.part)
        self.part = b""
        self.ready.clear()
        return self.offset


def check_source(message: UpdateWeights) -> None:
    """Raises RequestError unless a message names one source of the weights."""
    if message.folder:
        if message.shared or message.size or message.sha256:
            raise RequestError(
                Code.INVALID_FIELD,
                "this update has a folder and also the name, size or sha256 of a file; expected "
                "one of them",
                path="$.folder",
            )
        if not message.folder.startswith("/"):
            raise RequestError(
                Code.INVALID_FIELD,
                f"the folder {message.folder!r} is a relative path; expected an absolute path on "
                "the workers' machines",
                path="$.folder",
            )
    elif message.shared and not SHARED_NAME.fullmatch(message.shared):
        raise RequestError(
            Code.INVALID_FIELD,
            f"{message.shared!r} is not the name of shared memory; expected letters, digits, '_', "
            "'-' and, after the first character, '.'",
            path="$.shared",
        )
    elif message.sha256 and not SHA256.fullmatch(message.sha256):
        raise RequestError(
            Code.INVALID_FIELD,
            f"{message.sha256!r} is not a SHA-256; expected 64 hexadecimal digits in lower case",
            path="$.sha256",
        )
    elif not message.size or not message.sha256:
        raise RequestError(
            Code.INVALID_FIELD,
            "this update names no weights; expected a folder, or the size and the sha256 of a "
            "safetensors file that is in shared memory or is sent in WEIGHTS",
            path="$.folder",
        )
