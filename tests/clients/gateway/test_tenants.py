"""A gateway with API keys of several tenants sends each request with its tenant's CURVE key."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenbus.clients import OwnKey
from tokenbus.clients.cli.main import main
from tokenbus.clients.gateway.users.keys import ApiKeys, KeyFileError
from tokenbus.protocol.tenants import Tenant

from ...processes import Gateway, Process, clean_environment, free_port, until
from ...websocket import connect
from ...worlds.keyed_broker import KeyedBroker, Worker, registration

WAIT_S = 120.0


@pytest.fixture
def tenants(
    processes: None, capsys: pytest.CaptureFixture[str]
) -> Iterator[tuple[Gateway, Worker, dict[str, tuple[str, str]]]]:
    """A gateway, a controller worker, and for each name an API key and its tenant's public key.

    The names ``own``, ``trainer`` and ``operator`` have the gateway's public key.
    """
    with KeyedBroker() as broker:
        found = {}
        api_keys = broker.path / "api-keys"
        for name in ("ann", "ben", "own", "trainer", "operator"):
            arguments = ["api-key", name, "--file", str(api_keys)]
            own = OwnKey.read(broker.keys.own("client"))
            if name == "operator":
                arguments += ["--tenant", str(broker.keys.own("client"))]
            elif name == "trainer":
                arguments += ["--operator"]
            elif name != "own":
                own = broker.new_key(name)
                own.write(broker.path / f"{name}.key")
                arguments += ["--tenant", str(broker.path / f"{name}.key")]
            assert main(arguments) == 0
            found[name] = capsys.readouterr().out.strip(), own.public
        ring = broker.server.core.state.keyring
        until(lambda: all(ring.admits("client", k) for _, k in found.values()), 300.0, "all keys")
        worker = Worker(broker.back, OwnKey.read(broker.keys.own("worker")))
        worker.send(registration("c", ("*",), "controller"))
        worker.receive(b"REGISTERED")
        http = f"127.0.0.1:{free_port()}"
        environment = clean_environment(
            front=broker.front, run_dir=broker.path, http=http, api_keys=api_keys
        )
        process = Process("tokenbus.clients.gateway", broker.path / "gateway.log", environment)
        gateway = Gateway(process, f"http://{http}")
        try:
            until(lambda: gateway.answers, WAIT_S, "a gateway that answers")
            yield gateway, worker, found
        finally:
            process.kill()
            worker.close()


def test_each_api_key_is_the_tenant_of_its_key(
    tenants: tuple[Gateway, Worker, dict[str, tuple[str, str]]],
) -> None:
    gateway, worker, keys = tenants
    del keys["trainer"]  # The worker has room for only nine requests, and answers none.
    for api_key, public in keys.values():
        # The worker does not answer the request. The test only checks that the request arrives.
        def ask(api_key: str = api_key) -> None:
            with contextlib.suppress(httpx.HTTPError):
                headers = {"authorization": f"Bearer {api_key}"}
                httpx.get(f"{gateway.url}/v1/controllers/tags", headers=headers, timeout=WAIT_S)

        threading.Thread(target=ask, daemon=True).start()
        assert Tenant.decode(worker.receive(b"TAGS")[-1]).key == public
    for api_key, public in keys.values():
        headers = {"authorization": f"Bearer {api_key}"}
        with connect(gateway.ws_url, additional_headers=headers) as websocket:
            websocket.send("TAGS " + json.dumps({"stream_id": 1}))
            assert Tenant.decode(worker.receive(b"TAGS")[-1]).key == public


def test_only_an_api_key_with_the_operator_s_key_is_the_operator(
    tenants: tuple[Gateway, Worker, dict[str, tuple[str, str]]],
) -> None:
    """The gateway's own CURVE key belongs to the operator. Only API keys of the operator's tenant
    may send the operator's messages over WebSocket."""
    gateway, _, keys = tenants
    for name, (api_key, _) in keys.items():
        headers = {"authorization": f"Bearer {api_key}"}
        with connect(gateway.ws_url, additional_headers=headers) as websocket:
            websocket.send("HELLO {}")
            assert str(websocket.recv(WAIT_S)).startswith("WELCOME")
            websocket.send("DRAIN " + json.dumps({"stream_id": 1, "worker": "nobody"}))
            kind, _, body = str(websocket.recv(WAIT_S)).partition(" ")
            expected = "invalid_field" if name == "operator" else "not_allowed"
            assert (name, kind, json.loads(body)["code"]) == (name, "ERROR", expected)
        # No worker serves a model, so a permitted pause fails too, with the code ``no_worker``.
        paused = httpx.post(f"{gateway.url}/pause", headers=headers, timeout=WAIT_S)
        code = "no_worker" if name in ("trainer", "operator") else "not_allowed"
        assert (name, paused.json()["error"]["code"]) == (name, code)


def test_a_key_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "api-keys"
    file.write_text(f"ann {'0' * 64} ann.key\n")
    with pytest.raises(KeyFileError, match=r"line 1 of .*cannot read the key .*ann\.key"):
        ApiKeys.read(file)
