"""The time in which a script may query constraints for the next tokens is bounded."""

from __future__ import annotations

import pytest
from tokenbus.protocol.errors import Code, TokenbusError
from tokenbus.workers.controller.scripts import next_tokens
from tokenbus.workers.controller.scripts.next_tokens import ConstraintQuestions

from ..backends.llguidance_streams import host
from .script_runs import constraints, vocabulary


def test_the_time_of_making_a_constraint_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_tokens, "MAX_MASKS_S", 0.0)
    questions = ConstraintQuestions(constraints().get, host("", vocabulary()))
    for code in (Code.INVALID_FIELD, Code.CONTROLLER_TIMEOUT):
        # The pattern is wrong, so the constraint cannot be made.
        with pytest.raises(TokenbusError) as refused:
            questions.next_tokens("regex", "(", [])
        assert refused.value.code == code
    questions.renew()
    with pytest.raises(TokenbusError) as again:
        questions.next_tokens("regex", "(", [])
    assert again.value.code == Code.INVALID_FIELD
    questions.close()
