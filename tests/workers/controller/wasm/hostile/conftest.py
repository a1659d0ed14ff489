"""Hostile guests in a whole system: each ends with a clear error, and other streams are unaffected.

While a hostile guest runs, the same controller worker also serves a stream with a well-behaved
controller. This stream continues, and has the same tokens as a stream that runs alone.
``benchmarks/isolation.py`` measures how much slower its steps become.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .....processes import Bus, Process
from .....worlds.hostile_guests import INIT_MS, System
from .guests import guest


@pytest.fixture(scope="package")
def system(processes: None) -> Iterator[System]:
    limits: dict[str, Any] = {
        "controller_init_ms": INIT_MS,
        "controller_pre_ms": 1,
        "controller_post_ms": 1,
        "controller_idle_wakes": 20,
    }
    with Bus(**limits) as bus:
        bus.start_worker()
        environment = bus.environment | {"PYTHONPATH": str(Path(__file__).parents[5])}
        log = bus.folder / "controller.log"
        worker = Process(f"{__package__}.patient_worker", log, environment)
        bus.others.append(worker)
        bus.start_other("state")
        bus.wait_for_models("embedded")
        bus.wait_for_roles("controller", "state")
        with bus.client() as client:
            client.upload_controller(guest(), tag="calm")
            yield System(bus, worker, client)
            assert worker.alive
