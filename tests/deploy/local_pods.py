"""Runs the pods of an overlay as processes of this machine.

The commands, variables and probes are those of the manifests. Only paths and addresses differ: a
volume is a folder of the test, and addresses are ports of 127.0.0.1.
"""

from __future__ import annotations

import base64
import os
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..processes import Process, clean_environment, free_port
from .manifests import Object, environment, pods

OWN = {
    "TOKENBUS_EXPIRY_S": "60",
    "TOKENBUS_RECOVER_S": "0.1",
    "TOKENBUS_THREADS": "1",
    "TOKENBUS_KV_CACHE_BYTES": str(64 * 2**20),
}
"""Settings for a busy machine with little memory. In these tests, no stream outlives its broker, so
a new broker need not wait for workers to report streams."""


class LocalPod:
    """A pod: its volumes as folders, and its containers as processes."""

    def __init__(
        self, overlay: str, spec: Object, made: Mapping[tuple[str, str], Object], folder: Path
    ) -> None:
        """``made``: Secrets and ConfigMaps that do not belong to the overlay, by kind and name."""
        self._overlay = overlay
        self._spec = spec
        self._folder = folder
        self._volumes: dict[str, Path] = {}
        for volume in spec["volumes"]:
            path = self._volume(volume["name"])
            if "secret" in volume:
                data = made["Secret", volume["secret"]["secretName"]]["data"]
                _fill(path, {name: base64.b64decode(text) for name, text in data.items()})
            elif "configMap" in volume:
                data = made["ConfigMap", volume["configMap"]["name"]]["data"]
                _fill(path, {name: text.encode() for name, text in data.items()})
        self.processes: dict[str, Process] = {}

    def prepare(self, python_path: str) -> None:
        """Runs the pod's init containers."""
        for container in self._spec["initContainers"]:
            places = self._places(container)
            command = [
                " ".join(_placed(part, places) for part in word.split(" "))
                for word in container["command"]
            ]
            subprocess.run(command, check=True, env={"PATH": python_path})

    def start(self, container: Object, ports: Mapping[str, str]) -> Process:
        """Starts a container, for the first time or after it has ended."""
        _, _, module, *arguments = container["command"]
        name = container["name"]
        process = Process(
            module,
            self._folder / f"{name}.log",
            self.variables(container, ports),
            arguments=arguments,
        )
        self.processes[name] = process
        return process

    def variables(self, container: Object, ports: Mapping[str, str]) -> dict[str, str]:
        """The environment of a container's process on this machine."""
        places = self._places(container)
        own: dict[str, str] = {}
        for name, value in environment(self._overlay, container).items():
            placed = _placed(value, places)
            for theirs, ours in ports.items():
                placed = placed.replace(theirs, ours)
            own[name] = placed
        outside = {k: v for k, v in clean_environment().items() if not k.startswith("TOKENBUS_")}
        return outside | own | OWN

    def runs(self, container: Object, command: list[str], ports: Mapping[str, str]) -> bool:
        """Whether the command of a probe succeeds."""
        done = subprocess.run(
            command, env=self.variables(container, ports), capture_output=True, check=False
        )
        return done.returncode == 0

    def _volume(self, name: str) -> Path:
        path = self._volumes.setdefault(name, self._folder / name)
        path.mkdir(exist_ok=True, mode=0o777)
        return path

    def _places(self, container: Object) -> dict[str, Path]:
        """The folders of a container's mounts, by path in the container. If a mount is inside
        another mount, the outer mount's folder has a link to the inner mount's folder."""
        places = {m["mountPath"]: self._volume(m["name"]) for m in container["volumeMounts"]}
        for path, place in places.items():
            parent, _, name = path.rpartition("/")
            if parent in places and not (places[parent] / name).exists():
                (places[parent] / name).symlink_to(place)
        return places


class LocalPods:
    """All pods of an overlay."""

    def __init__(self, overlay: str, made: Mapping[tuple[str, str], Object], folder: Path) -> None:
        self.http = f"127.0.0.1:{free_port()}"
        front, back = free_port(), free_port()
        self.ports = {
            "tokenbus-broker:5555": f"127.0.0.1:{front}",
            "tokenbus-broker:5556": f"127.0.0.1:{back}",
            "0.0.0.0:5555": f"127.0.0.1:{front}",
            "0.0.0.0:5556": f"127.0.0.1:{back}",
            "0.0.0.0:8080": self.http,
        }
        self.pods: dict[str, LocalPod] = {}
        self.containers: dict[str, Object] = {}
        """The containers of all pods, by name."""
        for component, template in pods(overlay).items():
            place = folder / component
            place.mkdir()
            self.pods[component] = LocalPod(overlay, template["spec"], made, place)
            for container in template["spec"]["containers"]:
                self.containers[container["name"]] = container | {"component": component}

    def start(self, name: str) -> Process:
        """Starts a container."""
        container = self.containers[name]
        return self.pods[container["component"]].start(container, self.ports)

    def start_all(self) -> None:
        """Prepares all pods, and starts all containers. The order does not matter."""
        for pod in self.pods.values():
            pod.prepare(os.environ["PATH"])
        for name in self.containers:
            self.start(name)

    def probe(self, name: str, kind: str) -> bool:
        """Whether a probe of a container succeeds. The probe must be a command."""
        container = self.containers[name]
        pod = self.pods[container["component"]]
        return pod.runs(container, container[kind]["exec"]["command"], self.ports)

    def processes(self) -> Iterator[Process]:
        """All processes that were started."""
        for pod in self.pods.values():
            yield from pod.processes.values()


def _fill(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes the files of a Secret or ConfigMap, readable by the group as in Kubernetes."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o440)


def _placed(text: str, places: Mapping[str, Path]) -> str:
    """The path on this machine for a path in a container. Any other text is returned unchanged."""
    for path in sorted(places, key=len, reverse=True):
        if text == path or text.startswith(f"{path}/"):
            return str(places[path]) + text.removeprefix(path)
    return text
