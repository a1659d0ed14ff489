"""Numbers of examples and rounds of tests: small in ``make test``, large in ``make test-long``.

Every number that trades time for coverage is computed here. The profile ``ci`` draws the same
examples in each run, so that a test only begins to fail because of a change. The profile ``long``
draws new examples. The option ``--hypothesis-profile`` chooses the profile, before any test module
is imported.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings

CI_EXAMPLES, LONG_EXAMPLES = 50, 1000

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Settings with which neither slow examples nor slow draws fail a test."""

settings.register_profile("ci", UNTIMED, max_examples=CI_EXAMPLES, derandomize=True)
settings.register_profile("long", UNTIMED, max_examples=LONG_EXAMPLES)
settings.load_profile("ci")


def examples(ci: int) -> int:
    """The number of examples of a property test: ``ci`` in the profile ``ci``, and 20 times ``ci``
    in the profile ``long``."""
    assert settings.default is not None
    return ci * settings.default.max_examples // CI_EXAMPLES


def rounds(ci: int, long: int) -> int:
    """The number of rounds of a test that does not use hypothesis: ``long`` in the profile
    ``long``, else ``ci``."""
    assert settings.default is not None
    return long if settings.default.max_examples >= LONG_EXAMPLES else ci
