"""A gateway checks API keys, origins and host names, and serves TLS."""

from __future__ import annotations

import base64
import json
import signal
import ssl
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from tokenbus.clients.gateway.users.keys import ApiKeys, hash_of, new_key
from websockets.exceptions import InvalidStatus
from websockets.typing import Origin

from ...processes import Bus, Gateway, Process, clean_environment, until
from ...websocket import connect
from ..wasm_guests import guest
from .certificates import self_signed

pytestmark = pytest.mark.process

KEY = new_key()


@pytest.fixture(scope="module")
def guarded(steered: Bus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway that requires an API key, and allows requests from the pages of one other site."""
    file = tmp_path_factory.mktemp("keys") / "api-keys"
    file.write_text(f"# people\nann {hash_of(KEY)}\n")
    gateway = steered.start_gateway(api_keys=file, cors="https://good.example")
    yield gateway
    gateway.process.kill()


def error_of(response: httpx.Response) -> dict[str, object]:
    error = response.json()["error"]
    assert isinstance(error, dict)
    return error


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/console", "/nowhere"])
def test_every_path_needs_a_key(guarded: Gateway, path: str) -> None:
    for headers in ({}, {"authorization": "Bearer tb-wrong"}, {"x-api-key": "tb-wrong"}):
        response = httpx.get(guarded.url + path, headers=headers, timeout=300)
        assert response.status_code == 401
        assert error_of(response)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


def test_each_door_refuses_in_its_own_form(guarded: Gateway) -> None:
    anthropic = httpx.post(guarded.url + "/v1/messages/count_tokens", timeout=300)
    assert anthropic.status_code == 401
    assert anthropic.json()["type"] == "error"
    assert error_of(anthropic)["type"] == "authentication_error"
    aici = httpx.get(guarded.url + "/v1/controllers/tags", timeout=300)
    assert aici.status_code == 401
    assert "API key" in aici.json()["message"]
    assert "error" not in aici.json()


def test_a_tag_names_the_holder_of_the_key_that_assigned_it(guarded: Gateway) -> None:
    with httpx.Client(base_url=guarded.url, headers={"api-key": KEY}, timeout=300.0) as client:
        wasm = guest()
        module = client.post("/v1/controllers", content=wasm).json()["module_id"]
        body = {"module_id": module, "tags": "of-ann"}
        [tag] = client.post("/v1/controllers/tags", json=body).json()["tags"]
    assert (tag["tag"], tag["updated_by"]) == ("of-ann", "ann")


def test_the_openai_package_gets_typed_errors_for_its_key(guarded: Gateway) -> None:
    def models(key: str) -> list[str]:
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
            return [model.id for model in client.models.list().data]

    assert models(KEY) == ["embedded"]
    with pytest.raises(openai.AuthenticationError) as caught:
        models("tb-wrong")
    assert caught.value.code == "invalid_api_key"


@pytest.mark.parametrize("path", ["/live", "/ready"])
def test_probes_need_no_key(guarded: Gateway, path: str) -> None:
    # ``/ready`` returns 503 if the broker does not answer within two seconds.
    until(lambda: httpx.get(guarded.url + path, timeout=300).status_code == 200, 300.0, path)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {KEY}"},
        {"x-api-key": KEY},
        {"api-key": KEY},
        {"authorization": "Basic " + base64.b64encode(f"ann:{KEY}".encode()).decode()},
    ],
)
def test_a_key_opens_every_path(guarded: Gateway, headers: dict[str, str]) -> None:
    response = httpx.get(guarded.url + "/v1/models", headers=headers, timeout=300)
    assert response.status_code == 200


def test_a_browser_asks_for_the_key_of_a_page(guarded: Gateway) -> None:
    response = httpx.get(guarded.url + "/metrics", headers={"accept": "text/html,*/*"}, timeout=300)
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Basic")


@pytest.mark.parametrize("path", ["/", "/console", "/chat/main.js", "/console/main.js"])
def test_files_of_pages_need_no_key_in_a_browser(guarded: Gateway, path: str) -> None:
    response = httpx.get(guarded.url + path, headers={"accept": "text/html,*/*"}, timeout=300)
    assert response.status_code == 200
    posted = httpx.post(guarded.url + "/console/request", json={}, timeout=300)
    assert posted.status_code == 401


def test_a_websocket_needs_a_key(guarded: Gateway) -> None:
    with pytest.raises(InvalidStatus) as refused:
        connect(guarded.ws_url)
    assert refused.value.response.status_code == 401
    assert json.loads(refused.value.response.body or b"")["error"]["code"] == "invalid_api_key"


def test_only_named_sites_may_use_it(guarded: Gateway) -> None:
    own = {"authorization": f"Bearer {KEY}"}
    good = httpx.get(
        guarded.url + "/live", headers={**own, "origin": "https://good.example"}, timeout=300
    )
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    bad = httpx.get(
        guarded.url + "/live", headers={**own, "origin": "https://bad.example"}, timeout=300
    )
    assert bad.status_code == 403
    assert error_of(bad)["code"] == "origin_not_allowed"
    preflight = httpx.options(
        guarded.url + "/v1/completions",
        headers={
            "origin": "https://good.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization",
        },
        timeout=300,
    )
    assert preflight.status_code == 200


def test_without_a_list_only_pages_of_its_own_may_use_it(gateway: Gateway) -> None:
    own = {"origin": gateway.url}
    assert httpx.get(gateway.url + "/live", headers=own, timeout=300).status_code == 200
    other = httpx.get(gateway.url + "/live", headers={"origin": "https://bad.example"}, timeout=300)
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers
    with pytest.raises(InvalidStatus) as refused:
        connect(gateway.ws_url, origin=Origin("https://bad.example"))
    assert refused.value.response.status_code == 403


def test_a_name_that_only_resolves_to_this_machine_is_refused(gateway: Gateway) -> None:
    response = httpx.get(gateway.url + "/live", headers={"host": "evil.example:8080"}, timeout=300)
    assert response.status_code == 403
    assert error_of(response)["code"] == "host_not_allowed"
    assert (
        httpx.get(gateway.url + "/live", headers={"host": "localhost:1"}, timeout=300).status_code
        == 200
    )


def test_the_address_of_the_gateway_is_the_chat_page_for_browsers(gateway: Gateway) -> None:
    for accept, path in (("text/html,*/*;q=0.8", "/"), ("*/*", "/console")):
        with httpx.Client(follow_redirects=True, timeout=300) as browser:
            page = browser.get(gateway.url + "/", headers={"accept": accept})
        assert page.status_code == 200
        assert page.url.path == path
        assert "<title>" in page.text


def test_an_unknown_path_and_a_wrong_method_have_errors_in_one_form(gateway: Gateway) -> None:
    unknown = httpx.get(gateway.url + "/v1/nothing", timeout=300)
    assert unknown.status_code == 404
    message = str(error_of(unknown)["message"])
    assert "'/v1/nothing'" in message
    assert "GET /openapi.json" in message
    wrong = httpx.post(gateway.url + "/live", timeout=300)
    assert wrong.status_code == 405
    assert "GET" in str(error_of(wrong)["message"])


@pytest.fixture(scope="module")
def certificate(processes: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The paths of a self-signed certificate for 127.0.0.1 and of its private key."""
    return self_signed(tmp_path_factory.mktemp("tls"))


def test_tls(steered: Bus, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    gateway = steered.start_gateway("https", tls_cert=cert, tls_key=key)
    try:
        trust = ssl.create_default_context(cafile=str(cert))
        assert httpx.get(gateway.url + "/live", verify=trust, timeout=300).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.get(gateway.url.replace("https", "http") + "/live", timeout=300)
    finally:
        gateway.process.kill()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"http": "0.0.0.0:8080"}, "http: 0.0.0.0:8080 is not a loopback address"),
        ({"http": "nonsense"}, "'nonsense' is not an address"),
        ({"http": "127.0.0.1:8080", "tls_cert": "a.pem"}, "one of tls_cert and tls_key is missing"),
        ({"http": "127.0.0.1:8080", "api_keys": "/nowhere"}, "cannot read the API keys"),
    ],
)
def test_a_wrong_setting_is_refused_at_the_start(
    settings: dict[str, object], message: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = Process("tokenbus.clients.gateway", log, clean_environment(**settings))
    try:
        assert process.wait(300) == 2
        assert message in process.log
    finally:
        process.kill()


def test_the_command_makes_a_key_whose_hash_is_in_the_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tokenbus.clients.cli", "api-key", "ann"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    key = done.stdout.strip()
    file = tmp_path / "api-keys"
    assert key not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
    assert ApiKeys.read(file).name_of(key) == "ann"
    assert ApiKeys.read(file).name_of(key + "x") is None


def test_gateways_share_a_port(steered: Bus) -> None:
    first = steered.start_gateway(gateways=2)
    second = steered.start_gateway(gateways=2, http=first.url.rpartition("/")[2])
    try:
        first.process.send(signal.SIGTERM)
        assert first.process.wait() == 0
        until(lambda: second.answers, 300.0, "an answer of the second gateway")
    finally:
        first.process.kill()
        second.process.kill()
