"""The errors of a hub and of its cache, each as one line and an exit code."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import cast
from urllib.parse import urlsplit

from ....protocol.hub_names import HubName
from ..exits import FAILED, REFUSED, UNAVAILABLE, WRONG_USAGE, one_line

TOKEN = "set HF_TOKEN to a token of an account that may read it"


class HubFault(Exception):
    """A model cannot be downloaded, listed or removed. The message is one line; ``exit_code`` is
    the exit code of the command."""

    def __init__(self, message: str, exit_code: int = REFUSED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def check_installed() -> None:
    """Raises HubFault if huggingface_hub is not installed."""
    if find_spec("huggingface_hub") is None:
        raise HubFault(
            "huggingface_hub is not installed; pip install 'tokenbus[gpu]' installs it", WRONG_USAGE
        )


def check_endpoint(endpoint: str) -> None:
    """Raises HubFault if a text is not the address of a hub."""
    try:
        parts = urlsplit(endpoint)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise HubFault(
            f"HF_ENDPOINT: {endpoint!r} is not the address of a hub; use one like "
            "https://huggingface.co",
            WRONG_USAGE,
        )


@contextmanager
def explained(name: HubName, endpoint: str) -> Iterator[None]:
    """Converts errors of huggingface_hub in the ``with`` block to HubFault. ``endpoint``: the hub's
    address."""
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    # The base class of all errors of the HTTP library that huggingface_hub uses.
    http_error = cast(type[Exception], HfHubHTTPError.__bases__[0])
    try:
        yield
    except LocalEntryNotFoundError as error:
        # huggingface_hub raises this error if a request fails and the cache does not have a copy
        # either.
        cause = error.__cause__
        raise _fault(cause if isinstance(cause, Exception) else error, name, endpoint) from error
    except (http_error, OSError, ValueError) as error:
        raise _fault(error, name, endpoint) from error


def _fault(error: Exception, name: HubName, endpoint: str) -> HubFault:
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        page = f"{endpoint}/{name.repository}"
        return HubFault(f"{name.repository} is gated: accept its terms at {page}, and {TOKEN}")
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, RepositoryNotFoundError) or status == 401:
        return HubFault(
            f"{endpoint} has no model {name.repository!r}, or the model is private: check the "
            f"name, or {TOKEN}"
        )
    if isinstance(error, RevisionNotFoundError):
        return HubFault(
            f"{name.repository} has no revision {name.revision!r}; expected a branch, a tag or a "
            "commit of the repository"
        )
    if status == 403:
        return HubFault(f"{endpoint} refuses to send {name.repository} (403): {TOKEN}")
    if status is not None:
        return HubFault(f"{endpoint} answered with an error: {one_line(str(error))}", UNAVAILABLE)
    if isinstance(error, OfflineModeIsEnabled):
        return HubFault("HF_HUB_OFFLINE is set, so models cannot be downloaded; unset it")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return HubFault(
            f"the disk is full; free some space and pull {name} again: complete files are kept",
            FAILED,
        )
    if isinstance(error, OSError) and error.errno is not None:
        where = error.filename or "the cache"
        return HubFault(f"cannot write {where}: {error.strerror}; check HF_HUB_CACHE", FAILED)
    reason = one_line(str(error)) or type(error).__name__
    again = "try again: complete files are kept"
    if "HF_ENDPOINT" in os.environ:
        again = f"check HF_ENDPOINT, or {again}"
    return HubFault(f"cannot download from {endpoint}: {reason}; {again}", UNAVAILABLE)
