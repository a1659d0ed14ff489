"""Hostile guests, through a whole system: each ends with a clear error, and nothing else does.

While each of them runs, so does a stream with a well-behaved controller in the same controller
worker: it has the tokens that it has alone, and goes on. How much slower its steps become is
measured by ``benchmarks/isolation.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .....processes import Bus
from .....worlds.hostile_guests import INIT_MS, System
from .guests import guest


@pytest.fixture(scope="package")
def system(processes: None) -> Iterator[System]:
    with Bus(controller_init_ms=INIT_MS, controller_idle_wakes=20) as bus:
        bus.start_worker()
        worker = bus.start_other("controller")
        bus.start_other("state")
        bus.wait_for_models("embedded")
        bus.wait_for_roles("controller", "state")
        with bus.client() as client:
            client.upload_controller(guest(), tag="calm")
            yield System(bus, worker, client)
            assert worker.alive
