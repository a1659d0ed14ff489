"""Further names of served models."""

from __future__ import annotations

import pytest
from tokenbus.protocol.model_names import AliasError, Aliases
from tokenbus.protocol.settings import SettingError, resolve


def test_an_exact_name_comes_before_a_pattern_and_a_model_keeps_its_name() -> None:
    aliases = Aliases(["gpt-*", "gpt-4o=big", "claude-*=gpt-oss", "plain"])
    assert [aliases.model(name) for name in ("gpt-4o", "gpt-5", "claude-x", "plain")] == [
        "big",
        "",
        "gpt-oss",
        "",
    ]
    assert [aliases.model(name) for name in ("gpt-oss", "big", "other", "")] == [
        "gpt-oss",
        "big",
        "other",
        "",
    ]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["=m"], "expected NAME or NAME=MODEL"),
        (["a="], "expected NAME or NAME=MODEL"),
        (["a=m", "a"], "'a' is given twice"),
        (["a=b", "b=c"], "'a' stands for 'b', which stands for another model"),
    ],
)
def test_an_entry_that_is_not_valid_is_refused_at_start(entries: list[str], words: str) -> None:
    with pytest.raises(AliasError, match=words):
        Aliases(entries)
    with pytest.raises(SettingError, match=f"served_model_name: .*{words}"):
        resolve({}, {"TOKENBUS_SERVED_MODEL_NAME": ",".join(entries)}, {}, "file")
