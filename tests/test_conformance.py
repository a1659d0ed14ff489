"""``docs/conformance.md`` names only files and tests that exist, and has all published names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenbus.workers.controller.wasm.abis import EXPORTS, IMPORTS

from .test_docs import defined

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "conformance.md"
NAMES = (
    *("init_prompt", "pre_process", "mid_process", "post_process", "Stop", "Continue", "Suspend"),
    *("Fork { num_forks", "SampleWithBias { bias", "allowed_tokens", "Splice { backtrack"),
    *("tokenize_bytes", "special_token", "vocab_size", "token(token)", "compute_bias"),
    *("self_seq_id", "VariableStorage", "`get`", "`set`", "`append`", "stdout", "stderr"),
    *("push_byte", "pop_bytes", "collapse", "byte_allowed", "special_allowed", "trie_finished"),
    *("try_push_byte", "AiciRecognizer", "FunctionalRecognizer", "StackRecognizer"),
    *("StringRecognizer", "initial", "SKIP", "keyword", "fd_write", "attention_masks"),
    *("ff_tokens", "ReadVar", "WriteVar", "VariableMissing", "when_version_is", "_start"),
    *("_initialize", "aici_panic", "TOKEN", "GENERATE", "SCORE", "logprob", "finish_reason"),
    *("top_logprobs", "stream_id", "temperature", "max_tokens", "logit_bias", "scored"),
    *("serve-model", "auto", "text mode", "buffers", "system messages", "retries", "pyaici"),
    *("start(coroutine)", "test(coroutine)", "GetPrompt", "FixedTokens", "gen_tokens", "gen_text"),
    *("fork(n)", "wait_vars", "get_var", "set_var", "append_var", "check_var", "Label()"),
    *("tokens_since", "text_since", "get_tokens", "get_prompt_len", "detokenize", "token_repr"),
    *("eos_token", "get_config", "TokenSet", "RegexConstraint", "CfgConstraint", "NextToken"),
    *("SubStrConstraint", "ChooseConstraint", "MidProcessResult", "log_level", "jsctrl", "pyctrl"),
)
"""The names in the published texts: traits and their functions, commands, messages and fields."""


class Row(NamedTuple):
    """A row of the page, which compares a line of a published text with this project."""

    text: str
    here: str
    code: list[str]
    tests: list[str]


def page() -> str:
    return PAGE.read_text()


def rows() -> list[Row]:
    """The rows of the tables that compare texts. The table of the differences is left out; its rows
    do not have four columns."""
    found = []
    for line in page().splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 4 or cells[0] in ("published", "fact", "---"):
            continue
        code, tests = (re.findall(r"`([^`]+)`", cell) for cell in cells[2:])
        found.append(Row(cells[0], cells[1], code, tests))
    return found


def test_every_line_has_a_file_and_a_test() -> None:
    assert len(rows()) > 100
    assert [row.text for row in rows() if not (row.here and row.code and row.tests)] == []


@pytest.mark.parametrize("path", sorted({path for row in rows() for path in row.code}))
def test_the_files_exist(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("test", sorted({test for row in rows() for test in row.tests}))
def test_the_tests_exist(test: str) -> None:
    path, name = test.split("::")
    assert name.startswith("test_")
    assert name in defined(ROOT / path)


def test_every_difference_has_a_reason_and_a_line_that_names_it() -> None:
    reasons = dict(re.findall(r"^\| (D\d+) \| .+ \| (.+) \|$", page(), re.MULTILINE))
    named = {number for row in rows() for number in re.findall(r"\bD\d+\b", row.here)}
    assert named == set(reasons)
    assert all(len(reason) > 20 for reason in reasons.values())


def test_a_line_that_does_not_hold_names_its_difference() -> None:
    different = [row for row in rows() if row.here.startswith("different")]
    assert different
    assert [row.text for row in different if not re.search(r"\(D\d+\)", row.here)] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_the_published_texts_is_there(name: str) -> None:
    assert any(name in row.text for row in rows())


def test_every_import_and_export_of_aici_s_binary_interface_is_there() -> None:
    names = {name for module, name in IMPORTS["aici"] if module == "env"} | EXPORTS["aici"].keys()
    assert {
        name for name in names if f"`{name}`" not in page() and f"`{name}(" not in page()
    } == set()
