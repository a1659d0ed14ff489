"""The flags of ``tokenbus up --ray``, and the programs that supervisord then runs."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from tokenbus.clients.cli import main
from tokenbus.clients.cluster.connection import reachable, system_name, variables_of_workers
from tokenbus.clients.cluster.members import resources
from tokenbus.clients.system.commands import add_command
from tokenbus.clients.system.conf import configuration
from tokenbus.clients.system.faults import WRONG_SETTING
from tokenbus.protocol.settings import Settings, resolve


def flags(*arguments: str) -> dict[str, Any]:
    """The settings that ``tokenbus up`` makes from its flags, by name."""
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    names = Settings.__struct_fields__
    parsed = vars(parser.parse_args(["up", *arguments]))
    return {name: value for name, value in parsed.items() if name in names}


def test_a_range_is_the_least_and_the_most() -> None:
    given = flags("--ray", "--gpu-workers", "2..16", "--controller-workers", "2..8")
    settings = resolve(given, {}, {}, "")
    assert (settings.gpu_workers, settings.max_gpu_workers) == (2, 16)
    assert (settings.controller_workers, settings.max_controller_workers) == (2, 8)
    assert resolve(flags("--gpu-workers", "3"), {}, {}, "").gpu_workers == 3


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--gpu-workers", "2..4"), "gpu_workers: 2..4 needs a Ray cluster; add --ray"),
        (("--ray", "--gpu-workers", "4..2"), "gpu_workers: the minimum of 4..2 exceeds the"),
        (("--ray", "--join", "there"), "join: --join there and --ray exclude each other"),
        (("--gpu-workers", "two"), "--gpu-workers: expected a whole number"),
        (("--ray", "--gpu-workers", "2..many"), "--max-gpu-workers: expected a whole number"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    arguments: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", "--http", "none", *arguments]) == WRONG_SETTING
    assert what in capsys.readouterr().err


def test_workers_are_the_cluster_s_and_the_rest_runs_here() -> None:
    conf = configuration(Settings(ray="auto", gpu_workers=2, controller_workers=2), "python")
    programs = {name: conf[name]["numprocs"] for name in conf.sections() if "worker" in name}
    assert programs == {
        "program:gpu-worker": "0",
        "program:controller-worker": "0",
        "program:state-worker": "1",
        "program:tool-worker": "0",
    }
    cluster = conf["program:cluster"]
    assert cluster["command"].endswith("-m tokenbus.clients.cluster")
    assert cluster["numprocs"] == "1"
    assert int(cluster["stopwaitsecs"]) > int(conf["program:broker"]["stopwaitsecs"])
    assert "program:cluster" not in configuration(Settings(), "python")


def test_a_rank_has_a_gpu_and_a_worker_without_has_cpus() -> None:
    assert resources("gpu", Settings(tp=4, device="cuda")) == {"GPU": 4, "CPU": 4}
    assert resources("gpu", Settings(device="cpu", threads=8)) == {"CPU": 8}
    assert resources("controller", Settings(tp=4)) == {"CPU": 1}


def test_workers_get_the_settings_and_no_key_or_file_of_this_machine() -> None:
    settings = Settings(
        run_dir="/r", model="m", back="tcp://10.0.0.1:5556", keys="/k", key="/c", health_file="/h"
    )
    variables = variables_of_workers(settings)
    theirs = resolve({}, variables, {}, "")
    assert (theirs.model, theirs.back) == ("m", "tcp://10.0.0.1:5556")
    assert (theirs.keys, theirs.key, theirs.health_file) == ("", "", "")


def test_the_name_of_a_system_is_of_its_run_directory() -> None:
    assert system_name(Settings(run_dir="/a")) == system_name(Settings(run_dir="/b/../a"))
    assert system_name(Settings(run_dir="/a")) != system_name(Settings(run_dir="/b"))


@pytest.mark.parametrize(
    ("endpoint", "can"),
    [
        ("ipc:///run/back.sock", False),
        ("tcp://127.0.0.1:5556", False),
        ("tcp://10.0.0.1:5556", True),
    ],
)
def test_other_machines_reach_no_loopback(endpoint: str, can: bool) -> None:
    assert reachable(endpoint) is can
