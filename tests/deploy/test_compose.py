"""The Compose file is valid, and the programs accept its commands and settings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml  # type: ignore[import-untyped]
from compose_viz.spec.compose_spec import ComposeSpecification
from tokenbus.clients.cli.main import main
from tokenbus.clients.gateway.users.security import OPEN_PATHS
from tokenbus.protocol.endpoints import host_and_port, is_loopback
from tokenbus.protocol.settings import Settings, resolve

from .manifests import ROOT

FILE = ROOT / "deploy" / "compose.yaml"
SYSTEMS = ("cpu", "gpu")
KILL_MARGIN_S = 10
"""A process is killed if it has not ended this number of seconds after ``drain_s``, as under
supervisord."""


def services() -> dict[str, Any]:
    """The services, with the default values of the user's variables."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", FILE.read_text())
    assert "${" not in text
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


def settings_of(service: dict[str, Any]) -> Settings:
    """The settings of a service; raises SettingError if a setting is not valid."""
    return resolve({}, service["environment"], {}, "")


def test_the_file_is_valid() -> None:
    ComposeSpecification.model_validate(yaml.safe_load(FILE.read_text()))
    with pytest.raises(ValueError, match="imag"):
        ComposeSpecification.model_validate({"services": {"cpu": {"imag": "tokenbus"}}})


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_has_an_image_and_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    service = services()[name]
    build = service["build"]
    assert (FILE.parent / build["context"] / build["dockerfile"]).resolve().is_file()
    program, *arguments = service["command"]
    assert program == "tokenbus"
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    assert "usage: tokenbus up" in capsys.readouterr().out


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_is_reached_through_its_gateway_only(name: str) -> None:
    service = services()[name]
    settings = settings_of(service)
    host, port = host_and_port(settings.http)
    # A gateway that listens on all addresses of its container needs API keys.
    assert not is_loopback(host)
    mounts = {one.split(":")[1] for one in service["volumes"]}
    assert {str(settings.run_folder), str(Path(settings.api_keys).parent)} <= mounts
    [published] = service["ports"]
    address, _, inside = published.rpartition(":")
    assert is_loopback(host_and_port(address)[0])
    assert int(inside) == port
    assert is_loopback(settings.front_endpoint.partition("://")[2].rpartition(":")[0])
    [probed] = re.findall(r"http://[^']+", service["healthcheck"]["test"][-1])
    assert urlsplit(probed).port == port
    assert urlsplit(probed).path in OPEN_PATHS


@pytest.mark.parametrize("name", SYSTEMS)
def test_streams_finish_before_a_system_is_killed(name: str) -> None:
    service = services()[name]
    assert service["stop_grace_period"].endswith("s")
    grace_s = float(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= settings_of(service).drain_s + KILL_MARGIN_S


def test_open_webui_uses_the_gateway() -> None:
    found = services()
    url = urlsplit(found["webui"]["environment"]["OPENAI_API_BASE_URL"])
    for name in SYSTEMS:
        assert url.hostname in found[name]["networks"]["default"]["aliases"]
        assert url.port == host_and_port(settings_of(found[name]).http)[1]
