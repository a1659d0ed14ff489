"""Connects a system to its Ray cluster, and gives the system a name in the cluster."""

from __future__ import annotations

import importlib
import socket
from hashlib import blake2b
from urllib.parse import urlsplit

import msgspec

from ...protocol.endpoints import is_loopback, separate
from ...protocol.settings import SettingError, Settings, environment
from .members import ray_module


def system_name(settings: Settings) -> str:
    """The name of a system in a Ray cluster, from its machine and its run directory."""
    place = f"{socket.gethostname()}:{settings.run_folder.resolve()}"
    return f"tokenbus-{blake2b(place.encode(), digest_size=6).hexdigest()}"


def connect(settings: Settings) -> None:
    """Connects to the Ray cluster. Raises SettingError if Ray is not installed, if no cluster runs,
    or if other nodes of the cluster cannot connect to the broker's address."""
    try:
        ray = ray_module()
    except ImportError:
        raise SettingError(
            "ray: the package is not installed; pip install 'tokenbus[ray]' installs it"
        ) from None
    try:
        ray.init(
            address=settings.ray,
            namespace="tokenbus",
            log_to_driver=False,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise SettingError(
            f"ray: cannot connect to a Ray cluster at {settings.ray!r} ({error}); start one with "
            "'ray start --head'"
        ) from None
    here = importlib.import_module("ray.util").get_node_ip_address()
    others = sorted({n["NodeManagerAddress"] for n in ray.nodes() if n["Alive"]} - {here})
    if others and not all(map(reachable, separate(settings.back_endpoint))):
        raise SettingError(
            f"back: {settings.back_endpoint} is reachable only from this machine, but Ray has "
            f"other nodes ({', '.join(others)}); set 'back' to tcp://{here}:5556, and make keys "
            "with 'tokenbus keys new'"
        )


def reachable(endpoint: str) -> bool:
    """Whether other machines can connect to an address."""
    parts = urlsplit(endpoint)
    return parts.scheme == "tcp" and not is_loopback(parts.hostname or "")


def variables_of_workers(settings: Settings) -> dict[str, str]:
    """The environment of the workers: the settings, except those that only this process uses."""
    own = msgspec.structs.replace(
        settings,
        run_dir=str(settings.run_folder.resolve()),
        back=settings.back_endpoint,
        health_file="",
        keys="",
        key="",
    )
    return environment(own)
