"""Ends workers that are left in a Ray cluster although their system does not run any more."""

from __future__ import annotations

import time

from ...protocol.settings import SettingError, Settings
from ..system.faults import WRONG_SETTING, SystemFault
from .connection import connect, system_name
from .members import Kind, Members, WorkerSetup

LOOK_EVERY_S = 0.1


def end_in_ray(settings: Settings) -> int:
    """Drains and ends the workers of all runs of a system; returns the number of workers.

    Raises SystemFault if ``connect`` fails, for example because no Ray cluster runs.
    """
    try:
        connect(settings)
    except SettingError as error:
        raise SystemFault(str(error), WRONG_SETTING) from None
    nothing = WorkerSetup({}, None)
    kinds: tuple[Kind, ...] = ("gpu", "controller")
    # This run has the empty name. All existing workers have other runs' names, so ``find`` retires
    # them.
    left = [Members(kind, system_name(settings), "", settings, nothing) for kind in kinds]
    now = time.monotonic()
    found = sum(members.find(now) for members in left)
    while not all(members.empty for members in left):
        for members in left:
            members.look(time.monotonic())
        time.sleep(LOOK_EVERY_S)
    print(f"ended {found} workers in the Ray cluster")
    return found
