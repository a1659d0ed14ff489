"""Requests of SGLang's and vLLM's trainers that are always refused. The error names an alternative.

Tensors in these requests are pickles, which can run code when they are read. The gateway never
reads them.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ..errors import ApiError

_WEIGHTS = (
    "weights are not transferred between processes or as pickled tensors; save them as safetensors "
    "and send their folder to /update_weights_from_disk, or use Operator.send_weights of the "
    "Python client"
)
_MEMORY = (
    "a worker does not release its memory while it runs; pause the model with /pause_generation, "
    "or end the worker with 'tokenbus drain'"
)
REFUSED = {
    "/update_weights_from_tensor": _WEIGHTS,
    "/update_weights_from_distributed": _WEIGHTS,
    "/update_weights_from_ipc": _WEIGHTS,
    "/init_weights_update_group": _WEIGHTS,
    "/destroy_weights_update_group": _WEIGHTS,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/collective_rpc": _WEIGHTS,
    "/release_memory_occupation": _MEMORY,
    "/resume_memory_occupation": _MEMORY,
    "/sleep": _MEMORY,
    "/wake_up": _MEMORY,
}
"""The reason and the alternative for each path."""


async def refuse(request: Request) -> Response:
    """Refuses a request without reading its body."""
    path = request.scope["path"]
    raise ApiError(400, f"{path} is not supported: {REFUSED[path]}", code="unsupported")
