"""A number of an override that no float can represent is an error of the controller."""

import pytest
from tokenbus.protocol.errors import ControllerError
from tokenbus.protocol.sampling import Override
from tokenbus.workers.controller.queries import checked_override


def test_a_temperature_beyond_floats_is_refused() -> None:
    with pytest.raises(ControllerError, match="right would be a number"):
        checked_override(Override(temperature=10**400))
