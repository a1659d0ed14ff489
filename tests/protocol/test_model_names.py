"""Further names of served models."""

from __future__ import annotations

import pytest
from tokenbus.protocol.model_names import AliasError, Aliases, adapter_folders
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


@pytest.mark.parametrize(
    ("entries", "model", "words"),
    [
        ("sql", "m", "'sql' is not a valid adapter; expected NAME=FOLDER"),
        ("=/sql", "m", "'=/sql' is not a valid adapter"),
        ("a=/b,a=/c", "m", "the name 'a' is in use"),
        ("m=/b", "m", "the name 'm' is in use"),
        ("a=/b", "auto", "name a model instead of 'auto'"),
    ],
)
def test_an_adapter_that_is_not_valid_is_refused_at_start(
    entries: str, model: str, words: str
) -> None:
    with pytest.raises(SettingError, match=f"^lora: .*{words}"):
        resolve({}, {"TOKENBUS_LORA": entries, "TOKENBUS_MODEL": model}, {}, "file")


def test_a_folder_of_an_adapter_may_have_an_equals_sign() -> None:
    assert adapter_folders(["a=/b=c", "d = e"]) == {"a": "/b=c", "d": "e"}
