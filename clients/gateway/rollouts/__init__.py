"""Requests that pause a model or replace its weights, for the operator's trainers. Some of the
paths are vLLM's and SGLang's."""

from __future__ import annotations

from typing import Literal

from starlette.routing import BaseRoute, Route

from ..errors import UpdateError
from ..openapi import Operation
from . import own, sglang
from .bodies import (
    AbortBody,
    ContinueBody,
    DiskBody,
    IsPaused,
    Message,
    PauseBody,
    PauseGenerationBody,
    PauseQuery,
    ResumeBody,
    RolloutAnswer,
    UpdateBody,
    Updated,
    WeightVersion,
    query_types,
)
from .refused import REFUSED, refuse

VERSION_PATHS = ("/model_info", "/get_model_info", "/get_weight_version", "/weight_version")
"""The paths under which SGLang's releases report the version of the weights."""
FLUSH_PATHS: tuple[tuple[str, Literal["get", "post"]], ...] = (
    ("/flush_cache", "get"),
    ("/flush_cache", "post"),
    ("/reset_prefix_cache", "post"),
)
"""The paths and methods with which SGLang and vLLM flush the cache."""


def routes() -> list[BaseRoute]:
    """The routes for the operator's requests, and for reading the states that these requests
    change."""
    return [
        Route("/pause", own.pause, methods=["POST"]),
        Route("/resume", own.resume, methods=["POST"]),
        Route("/is_paused", own.is_paused, methods=["GET"]),
        Route("/update_weights", own.update_weights, methods=["POST"]),
        Route("/pause_generation", sglang.pause_generation, methods=["POST"]),
        Route("/continue_generation", sglang.continue_generation, methods=["POST"]),
        Route("/update_weights_from_disk", sglang.update_from_disk, methods=["POST"]),
        Route("/abort_request", sglang.abort_request, methods=["POST"]),
        *(Route(path, sglang.flush_cache, methods=[method]) for path, method in FLUSH_PATHS),
        *(Route(path, sglang.weight_version, methods=["GET"]) for path in VERSION_PATHS),
        *(Route(path, refuse, methods=["POST"]) for path in REFUSED),
    ]


def operations() -> list[Operation]:
    """The operations for the OpenAPI document."""
    forbidden = {403: "The request does not come from the operator."}
    found = [
        Operation("post", path, summary, "rollouts", body, answer, statuses=forbidden, query=query)
        for path, summary, body, answer, query in (
            ("/pause", "Pauses a model", PauseBody, RolloutAnswer, query_types(PauseQuery)),
            ("/resume", "Ends a pause", ResumeBody, RolloutAnswer, {"model": str}),
            ("/update_weights", "Replaces the weights", UpdateBody, RolloutAnswer, {}),
            ("/pause_generation", "Pauses a model", PauseGenerationBody, Message, {}),
            ("/continue_generation", "Ends a pause", ContinueBody, Message, {}),
            ("/abort_request", "Ends all streams of a model", AbortBody, Message, {}),
        )
    ]
    disk = "/update_weights_from_disk", "Replaces the weights", "rollouts", DiskBody, Updated
    model = {"model": str}
    return [
        *found,
        Operation("post", *disk, error=UpdateError, statuses=forbidden),
        Operation("get", "/is_paused", "Pauses", "rollouts", answer=IsPaused, query=model),
        *(
            Operation(method, path, "Has no effect", "rollouts", answer=Message)
            for path, method in FLUSH_PATHS
        ),
        *(
            Operation("get", path, "Version", "rollouts", answer=WeightVersion, query=model)
            for path in VERSION_PATHS
        ),
        *(Operation("post", path, "Is refused", "rollouts") for path in REFUSED),
    ]
