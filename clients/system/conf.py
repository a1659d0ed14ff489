"""Derives the ``supervisord.conf`` of a system from the packaged file and the settings.
``Supervisor.start`` writes it."""

from __future__ import annotations

import math
from configparser import RawConfigParser
from pathlib import Path

import msgspec

from ...protocol.settings import Settings

CONF = Path(__file__).parent.parent / "supervisord.conf"
"""The packaged ``supervisord.conf``. In a checkout, it is a link to the file at the top level."""
RUN_DIR = "%(here)s/run"
"""The name of the run directory in the packaged file. ``Supervisor.start`` writes the derived file
into the run directory itself, so ``configuration`` replaces this text by ``%(here)s``."""
GPU_WORKER, CLUSTER = "tokenbus.workers.gpu", "tokenbus.clients.cluster"
"""The modules of the GPU worker and of the process that manages workers in a Ray cluster."""
STOP_MARGIN_S = 10
"""A stopping process is killed after ``drain_s`` plus this number of seconds."""


def configuration(settings: Settings, python: str) -> RawConfigParser:
    """The packaged ``supervisord.conf``, changed as these settings require. ``python`` is the
    interpreter that runs Tokenbus."""
    conf = RawConfigParser()
    conf.read_string(CONF.read_text(encoding="utf-8"))
    # All processes inherit the settings from the environment, so this option is not needed.
    conf.remove_option("supervisord", "environment")
    for section in conf.values():
        for key, value in section.items():
            section[key] = value.replace(RUN_DIR, "%(here)s")
    interpreter = f'"{python.replace("%", "%%")}" '
    for name in conf.sections():
        if name.startswith("program:"):
            program = conf[name]
            program["command"] = program["command"].replace("python ", interpreter, 1)
            program["stopwaitsecs"] = str(math.ceil(settings.drain_s) + STOP_MARGIN_S)
    conf["program:tool-worker"]["numprocs"] = str(len(settings.tools) + len(settings.mcp))
    conf["program:state-worker"]["numprocs"] = str(min(1, settings.controller_workers))
    if settings.ray:
        _place_workers_in_ray(conf)
        settings = msgspec.structs.replace(settings, gpu_workers=0, controller_workers=0)
    if settings.brokers > 1:
        _several_brokers(conf, settings.brokers)
    conf["program:gpu-worker"]["numprocs"] = str(settings.gpu_workers)
    conf["program:controller-worker"]["numprocs"] = str(settings.controller_workers)
    if settings.join:
        # Only the machine with the broker runs these programs.
        for name in ("program:broker", "program:state-worker", "program:gateway"):
            conf.remove_section(name)
    elif settings.http == "none":
        conf.remove_section("program:gateway")
    else:
        conf["program:gateway"]["numprocs"] = str(settings.gateways)
    return conf


def _place_workers_in_ray(conf: RawConfigParser) -> None:
    """Adds the process that manages GPU workers and controller workers in a Ray cluster."""
    program = conf["program:gpu-worker"]
    drains = int(program["stopwaitsecs"])
    conf["program:cluster"] = {
        **program,
        "command": program["command"].replace(GPU_WORKER, CLUSTER),
        "numprocs": "1",
        # The process ends after its workers. These may need as long as local workers (``drains``).
        # The process itself needs the margin.
        "stopwaitsecs": str(drains + STOP_MARGIN_S),
    }


def _several_brokers(conf: RawConfigParser, number: int) -> None:
    """Makes supervisord start ``number`` brokers, each with its number as an argument, and with its
    own process name and log file."""
    broker = conf["program:broker"]
    broker["numprocs"] = str(number)
    broker["process_name"] = "%(program_name)s-%(process_num)d"
    broker["command"] += " %(process_num)d"
    name = "%(program_name)s"
    broker["stdout_logfile"] = broker["stdout_logfile"].replace(name, f"{name}-%(process_num)d")
