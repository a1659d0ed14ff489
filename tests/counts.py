"""How much the property tests try: a little in ``make test``, a lot in ``make test-long``.

Every number of examples, steps or rounds that trades time for coverage comes from here. The profile
``ci`` draws the same examples in each run, so that a test that fails does so because of a change;
``long`` draws new ones. ``--hypothesis-profile`` chooses, before any test module is imported.
"""

from __future__ import annotations

from hypothesis import settings

CI_EXAMPLES, LONG_EXAMPLES = 50, 1000

settings.register_profile("ci", max_examples=CI_EXAMPLES, deadline=None, derandomize=True)
settings.register_profile("long", max_examples=LONG_EXAMPLES, deadline=None)
settings.load_profile("ci")


def examples(ci: int) -> int:
    """The number of examples of a test that tries ``ci`` in the profile ``ci``."""
    assert settings.default is not None
    return ci * settings.default.max_examples // CI_EXAMPLES


def rounds(ci: int, long: int) -> int:
    """The number of rounds of a test that is not a property of hypothesis's; it is marked
    ``long``."""
    assert settings.default is not None
    return long if settings.default.max_examples >= LONG_EXAMPLES else ci
