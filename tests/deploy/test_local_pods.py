"""The manifests work with real processes: keys, commands, probes and signals."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import kubernetes_validate
import pytest
from tokenbus.clients.cli import main

from ..processes import until
from .local_pods import LocalPods
from .manifests import FOLDER, Object, kubectl, objects
from .test_kubernetes import KUBERNETES, MADE_BY_HAND

PATIENCE_S = 300.0


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of keys, and a folder with a tenant's key. The second folder will also have the file
    of API keys."""
    folder = tmp_path_factory.mktemp("keys")
    keys, http = folder / "keys", folder / "http"
    http.mkdir()
    assert main(["keys", "new", "ann", "--keys", str(keys), "--file", str(http / "ann.key")]) == 0
    return keys, http


@pytest.fixture(scope="module")
def api_key(keys: tuple[Path, Path]) -> str:
    """An API key of the tenant ``ann``."""
    printed, http = io.StringIO(), keys[1]
    of_tenant = ["--tenant", str(http / "ann.key"), "--file", str(http / "api-keys")]
    with contextlib.redirect_stdout(printed):
        assert main(["api-key", "someone", *of_tenant]) == 0
    return printed.getvalue().strip()


@pytest.fixture(scope="module")
def made(processes: None, keys: tuple[Path, Path], api_key: str) -> dict[tuple[str, str], Object]:
    """The objects that secrets.sh makes from the keys, by kind and name."""
    path = f"{Path(kubectl()).parent}:{os.environ['PATH']}"
    text = subprocess.run(
        [FOLDER / "secrets.sh", *keys],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path},
    ).stdout
    return {(found["kind"], found["metadata"]["name"]): found for found in objects(text)}


def test_the_script_makes_the_secrets_that_the_pods_have(
    made: dict[tuple[str, str], Object],
) -> None:
    for found in made.values():
        kubernetes_validate.validate(found, KUBERNETES, strict=True)
        assert found["metadata"]["namespace"] == "tokenbus"
    assert set(made) == {
        *(("Secret", name) for name in MADE_BY_HAND["secretName"]),
        *(("ConfigMap", name) for name in MADE_BY_HAND["configMap"]),
    }


def test_no_secret_key_is_in_a_configmap(
    made: dict[tuple[str, str], Object], keys: tuple[Path, Path]
) -> None:
    for (kind, _), found in made.items():
        if kind == "ConfigMap":
            assert "secret" not in str(found["data"])
            assert found["data"]


@pytest.fixture(scope="module")
def local(
    made: dict[tuple[str, str], Object], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LocalPods]:
    """The pods of the overlay without GPUs."""
    local = LocalPods("cpu", made, tmp_path_factory.mktemp("pods"))
    try:
        local.start_all()
        for name in by_command(local):
            until(partial(local.probe, name, "readinessProbe"), PATIENCE_S, f"{name} ready")
        yield local
    finally:
        for process in local.processes():
            process.kill()


def by_command(local: LocalPods) -> list[str]:
    """The names of the containers whose probes are commands. The gateway is the only other
    container."""
    return [name for name, c in local.containers.items() if "exec" in c["readinessProbe"]]


def test_pods_become_ready_and_serve(local: LocalPods, api_key: str) -> None:
    for name in by_command(local):
        assert local.probe(name, "startupProbe")
        assert local.probe(name, "livenessProbe")
    serve(local, api_key)


def test_a_probe_fails_where_the_process_does_not_touch_its_file(local: LocalPods) -> None:
    health = Path(
        local.pods["broker"].variables(local.containers["broker"], local.ports)[
            "TOKENBUS_HEALTH_FILE"
        ]
    )
    local.pods["broker"].processes["broker"].send(signal.SIGSTOP)
    try:
        os.utime(health, (0, 0))
        assert not local.probe("broker", "livenessProbe")
        assert not local.probe("broker", "readinessProbe")
    finally:
        local.pods["broker"].processes["broker"].send(signal.SIGCONT)
    until(lambda: local.probe("broker", "readinessProbe"), PATIENCE_S, "the broker is ready")


def test_a_broker_that_is_replaced_is_no_end_of_the_system(local: LocalPods, api_key: str) -> None:
    broker = local.pods["broker"].processes["broker"]
    broker.send(signal.SIGTERM)
    assert broker.wait() == 0
    before = registrations(local)
    local.start("broker")
    until(
        lambda: all(n > before[name] for name, n in registrations(local).items()),
        PATIENCE_S,
        "workers that have registered again",
    )
    assert len(before) == 3
    serve(local, api_key)


def test_sigterm_ends_every_container_in_order(local: LocalPods, api_key: str) -> None:
    serve(local, api_key)
    for component in ("gateway", "gpu-worker", "controller-worker", "state-worker"):
        for process in local.pods[component].processes.values():
            process.send(signal.SIGTERM)
            assert process.wait() == 0


def registrations(local: LocalPods) -> dict[str, int]:
    """The number of registrations of each worker. The standby state worker is left out."""
    logs = {name: p.log for pod in local.pods.values() for name, p in pod.processes.items()}
    counts = {name: log.count("registered with the broker") for name, log in logs.items()}
    return {name: count for name, count in counts.items() if count}


def serve(local: LocalPods, api_key: str) -> None:
    """Sends a request with a controller through the gateway, after the gateway's probe has
    succeeded."""
    gateway = local.containers["gateway"]
    process = local.pods["gateway"].processes["gateway"]
    probe = gateway["readinessProbe"]["httpGet"]["path"]

    def ready() -> bool:
        assert process.alive, process.log
        try:
            answer = httpx.get(f"http://{local.http}{probe}", timeout=10.0)
        except httpx.TransportError:
            return False
        return answer.status_code == 200

    until(ready, PATIENCE_S, "a gateway that is ready")
    answer = httpx.post(
        f"http://{local.http}/v1/completions",
        headers={"Authorization": f"Bearer {api_key}"},
        json={
            "model": "embedded",
            "prompt": "def add(a, b):",
            "max_tokens": 8,
            "structured_outputs": {"regex": "[0-9]{4}"},
        },
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"].isdecimal()
