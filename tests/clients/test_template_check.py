"""``tokenbus template check``: the effect of a chat template on the messages of agents."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from tokenbus.clients.cli.main import main

STRICT = """\
{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('a late system') }}{% endif %}
{%- if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('twice') }}{% endif %}
{{- '<' + m.role + '>' + m.content }}
{%- endfor %}"""


def effects(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    lines = capsys.readouterr().out.splitlines()
    found = (line.split("  ", 1) for line in lines if line[:1].strip())
    return {case: effect.strip() for case, effect in found}


def test_a_model_s_name_may_be_too_long_for_a_path(capsys: pytest.CaptureFixture[str]) -> None:
    with tempfile.TemporaryDirectory(prefix="tb-") as folder:
        front = f"ipc://{folder}/none.sock"
        assert main(["template", "check", "m" * 5000, "--front", front]) == 3
    assert f"no broker answers at {front}" in capsys.readouterr().err


@pytest.mark.process
def test_the_arrangement_of_each_refused_order_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"chat_template": STRICT, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert main(["template", "check", str(tmp_path)]) == 0
    found = effects(capsys)
    assert found["system message first"] == "rendered in this order"
    late = "the template refuses this order; rendered as: system, user, assistant, user"
    assert found["system message in the middle"] == late
    assert found["two user messages in a row"].endswith("rendered as: user")
    assert found["developer message"].startswith("developer messages become system messages")
    assert "the template hides the tools; answers have no thinking" in found["tools"]
    assert found["thinking of an earlier answer"].endswith("the template hides this thinking")


@pytest.mark.process
def test_a_template_that_refuses_every_order_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_text("{{ raise_exception('never') if messages[1] else messages[0].content }}")
    assert main(["template", "check", str(file), "--text"]) == 1
    shown = capsys.readouterr().out
    assert "never" in shown
    assert "| Hello" in shown
    (tmp_path / "tokenizer_config.json").write_text("{")
    file.unlink()
    assert main(["template", "check", str(tmp_path)]) == 2
    assert "not valid" in capsys.readouterr().err


def test_a_path_that_does_not_exist_is_refused_without_a_broker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["template", "check", "./no-such-folder"]) == 2
    assert "./no-such-folder does not exist" in capsys.readouterr().err
