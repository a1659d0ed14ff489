"""Clients of Tokenbus. A client streams tokens from models that run in other processes.

    from tokenbus.clients import Client

    with Client() as client:
        for token in client.generate("def add(a, b):", max_tokens=20):
            print(token.text, end="")

The package imports neither torch nor transformers.
"""

from ..protocol.errors import (
    Code,
    ConnectionLostError,
    ControllerError,
    RequestError,
    RequestTimeoutError,
    ServiceError,
    SlowClientError,
    TokenbusError,
    UnavailableError,
)
from ..protocol.keys import KeyFault, OwnKey
from ..protocol.messages import (
    ModelInfo,
    Rollout,
    Status,
    StoredModule,
    StreamStatus,
    System,
    Tagged,
    Token,
    TokenizerFiles,
)
from .async_client import AsyncClient
from .chats import AsyncChat, Chat
from .client import Client
from .request_options import GenerateOptions, RequestOptions, ScoreOptions
from .results import GeneratedSequence, Scores
from .streams import AsyncStream, Stream

__all__ = [
    "AsyncChat",
    "AsyncClient",
    "AsyncStream",
    "Chat",
    "Client",
    "Code",
    "ConnectionLostError",
    "ControllerError",
    "GenerateOptions",
    "KeyFault",
    "ModelInfo",
    "OwnKey",
    "RequestError",
    "RequestOptions",
    "RequestTimeoutError",
    "Rollout",
    "Scores",
    "GeneratedSequence",
    "ScoreOptions",
    "ServiceError",
    "SlowClientError",
    "Status",
    "StoredModule",
    "Tagged",
    "Stream",
    "StreamStatus",
    "System",
    "Token",
    "TokenizerFiles",
    "TokenbusError",
    "UnavailableError",
]
