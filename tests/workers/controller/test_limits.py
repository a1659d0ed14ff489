"""The limits of a controller that follow from the settings."""

from __future__ import annotations

from tokenbus.protocol.settings import Settings
from tokenbus.workers.controller.worker import limits_of
from tokenbus.workers.gpu.serving.steering import decision_timeout

CALLS_MS = {"controller_pre_ms": 1, "controller_mid_ms": 20, "controller_post_ms": 2}


def settings(**more: float) -> Settings:
    return Settings(controller_init_ms=500, controller_decision_s=10, **CALLS_MS, **more)  # type: ignore[arg-type]


def test_scripts_have_a_limit_of_their_own() -> None:
    made = limits_of(settings(controller_script_ms=70))
    assert (made.script_s, made.pre_s, made.mid_s, made.post_s) == (0.07, 0.001, 0.02, 0.002)


def test_the_watchdog_and_the_gpu_worker_allow_for_the_calls_of_modules_and_of_scripts() -> None:
    scripts, modules = settings(controller_script_ms=1000), settings(controller_script_ms=1)
    assert limits_of(scripts).watched_round_s == 3.0
    assert round(limits_of(modules).watched_round_s, 6) == 0.023
    assert decision_timeout(scripts) == 13.5
    assert decision_timeout(modules) == 10.523
