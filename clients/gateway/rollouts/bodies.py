"""Bodies and answers of the operator's requests."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request

from ....protocol.decoders import convert
from ....protocol.messages import (
    MAX_FOLDER,
    MAX_TIMEOUT_S,
    PauseMode,
    Rollout,
    UpdateMode,
    WeightsVersion,
)
from ..bodies.leniency import Ignored
from ..bodies.reading import B, Body, check_json, decode_in_turn, ignored_of, read_bytes
from ..bodies.wrong_values import refusal
from ..context import gateway_of
from ..errors import invalid_field

MAX_BODY = 64 * 1024
"""Maximum size of a body in bytes."""
Folder = Annotated[str, Meta(min_length=1, max_length=MAX_FOLDER)]
Timeout = Annotated[float, Meta(gt=0, le=MAX_TIMEOUT_S)]


class ResumeBody(Body):
    """The body of ``POST /resume``."""

    model: str | None = None
    """The name of the model. If it is missing, the request is for the default model."""
    timeout_s: Timeout | None = None
    """Seconds after which the request fails if a worker has not answered. Default: 600."""


class PauseBody(ResumeBody):
    """The body of ``POST /pause``."""

    mode: PauseMode | None = None
    """How the live streams of the model are treated, as in PAUSE. Default: ``keep``."""


class UpdateBody(ResumeBody, kw_only=True):
    """The body of ``POST /update_weights``: the fields of UPDATE_WEIGHTS."""

    folder: Folder
    version: WeightsVersion | None = None
    mode: UpdateMode | None = None
    """How the KV cache of live streams is treated, as in UPDATE_WEIGHTS. Default:
    ``recompute``."""
    update_info: Any = None
    """vLLM's description of a transfer between processes. Refused, because it is not supported."""

    def check(self) -> None:
        """Raises ApiError 400 for a field that is not supported."""
        if self.update_info is not None:
            raise invalid_field(
                "update_info",
                "weights are not transferred between processes; save them as safetensors and name "
                "their folder",
            )


class PauseQuery(Struct, kw_only=True):
    """The query of ``POST /pause`` and ``POST /resume``, as in vLLM."""

    model: str | None = None
    mode: PauseMode | None = None
    """The mode if the body does not have one. Default: ``abort`` without a body, otherwise
    ``keep``."""
    wait_for_inflight_requests: bool | None = None
    """An older field for the mode ``wait``. If it is true, ``mode`` of the query has no effect."""


class PauseGenerationBody(ResumeBody):
    """The body of SGLang's ``POST /pause_generation``."""

    mode: Literal["abort", "in_place", "retract"] | None = None
    """Default: ``abort``. Each of the other two modes means ``keep``, because the later update of
    the weights decides whether keys and values are computed again."""


class ContinueBody(ResumeBody):
    """The body of SGLang's ``POST /continue_generation``."""


class AbortBody(ResumeBody):
    """The body of SGLang's ``POST /abort_request``."""

    abort_all: bool | None = None
    """Whether all live streams of the model end. Required, because no other abort is supported."""
    rid: str | None = None
    """Ignored with ``abort_all``, as in SGLang."""

    def check(self) -> None:
        """Raises ApiError 400 if the body does not have ``abort_all``."""
        if not self.abort_all:
            raise invalid_field(
                "abort_all",
                "a request is not aborted by its rid; close its connection, or send "
                '{"abort_all": true} to abort all requests of the model',
            )


class DiskBody(ResumeBody, kw_only=True):
    """The body of SGLang's ``POST /update_weights_from_disk``."""

    model_path: Folder
    """The folder of the new weights, as in UPDATE_WEIGHTS."""
    weight_version: str | int | None = None
    """The number of the new version, as an integer or as text. Default: the next number."""
    flush_cache: bool | None = None
    """False means the mode ``keep`` of UPDATE_WEIGHTS, true the mode ``recompute``. Default:
    true."""
    abort_all_requests: bool | None = None
    """Whether live streams of the model end before the update."""

    @property
    def version(self) -> int:
        """The version for UPDATE_WEIGHTS; 0 for the next number. Raises ApiError 400 if
        ``weight_version`` is not a number above 0."""
        if self.weight_version is None:
            return 0
        try:
            given = convert(self.weight_version, WeightsVersion, strict=False)
        except msgspec.ValidationError:
            given = 0  # The check below raises the error.
        if not given:
            raise invalid_field(
                "weight_version",
                "weight_version: expected a whole number above that of the current weights, not "
                f"{str(self.weight_version)[:40]!r}",
            )
        return int(given)


class RolloutAnswer(Struct, kw_only=True):
    """The answer of ``/pause``, ``/resume`` and ``/update_weights``: the fields of ``Rollout``."""

    status: Literal["paused", "resumed", "updated"]
    model: str
    version: int
    workers: int
    streams: int
    update_pause_ms: float
    weights: str

    @classmethod
    def of(cls, status: Literal["paused", "resumed", "updated"], done: Rollout) -> RolloutAnswer:
        """The answer for a result of the bus."""
        return cls(status=status, **msgspec.structs.asdict(done))


class Message(Struct):
    """SGLang's answer to requests that succeed."""

    message: str
    status: Literal["ok"] = "ok"


class Updated(Struct):
    """SGLang's answer to an update."""

    message: str
    num_paused_requests: int
    """Number of live streams that continue with the new weights, or that were aborted."""
    success: Literal[True] = True


class IsPaused(Struct):
    """The answer of ``GET /is_paused``."""

    is_paused: bool


class WeightVersion(Struct):
    """The version of a model's weights."""

    model: str
    weight_version: str
    """The number of the last update of the weights, or a hash of them before the first update."""


async def read_optional(request: Request, kind: type[B]) -> tuple[B, Ignored, bool]:
    """Reads a request's body, which may be empty, because all of its fields are optional. Returns
    the body, its fields that have no effect, and False if the body was empty."""
    ignored = ignored_of(request)
    content = await read_bytes(request, MAX_BODY)
    if not content:
        return kind(), ignored, False
    check_json(request)
    return await decode_in_turn(gateway_of(request), content, kind, ignored), ignored, True


def query_of(request: Request) -> PauseQuery:
    """The query of a request; raises ApiError 400 for a wrong value."""
    given = dict(request.query_params)
    try:
        return convert(given, PauseQuery, strict=False)
    except msgspec.ValidationError as error:
        raise refusal(error, PauseQuery, lambda: given) from None


def query_types(kind: type[Struct]) -> dict[str, Any]:
    """The types of a query's parameters by name, for the OpenAPI document."""
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
