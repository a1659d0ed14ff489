"""Errors and warnings of the compiler for C files that ``tokenbus controller`` compiles."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenbus.clients.cli.module_files import FileFault, read_module

from ..processes import Bus
from .controller_command import tokenbus

pytestmark = pytest.mark.anyio


def test_c_is_compiled_against_the_sdk_and_its_errors_are_the_compiler_s(
    steered: Bus, tmp_path: Path
) -> None:
    pytest.importorskip("ziglang")
    good, bad = tmp_path / "good.c", tmp_path / "bad.c"
    good.write_text(
        '#include "tokenbus.h"\n'
        "void tb_init_prompt(const uint32_t *p, uint32_t n, const char *arg, uint32_t len) {\n"
        '  (void)p; (void)len; tb_log("%s, %u", arg, n > 0);\n}\n'
    )
    bad.write_text("int x = ;\n")
    run = tokenbus(steered, "run", str(good), "--arg", "hello", "--max-tokens", "2", "--json")
    [sequence] = json.loads(run.stdout)["sequences"]
    assert sequence["logs"] == "hello, 1"
    run = tokenbus(steered, "run", str(bad))
    assert (run.returncode, run.stdout) == (2, "")
    assert "expected expression" in run.stderr


@pytest.mark.process
def test_a_slip_in_the_name_of_a_call_in_c_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    file = tmp_path / "slip.c"
    for wrong, says in (
        ("tb_init_promt", "unknown call tb_init_promt; did you mean tb_init_prompt?"),
        ("tb_xyz", "the calls are tb_init_prompt, tb_pre_process"),
    ):
        file.write_text(f'#include "tokenbus.h"\nvoid {wrong}(void) {{}}\n')
        for _ in range(2):  # The second time, all files are in the compiler's cache.
            with pytest.raises(FileFault, match=re.escape(says)):
                read_module(file)


@pytest.mark.process
def test_warnings_of_c_that_compiles_are_shown(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ziglang")
    file = tmp_path / "warned.c"
    file.write_text(
        '#include "tokenbus.h"\n'
        "int own(void) { return 1; }\n"
        "tb_answer tb_pre_process(void) { int unused = own(); return tb_go_on(); }\n"
    )
    for _ in range(2):
        assert read_module(file)[:4] == b"\0asm"
        shown = capfd.readouterr().err
        assert "unused variable 'unused'" in shown
        assert "prototype" not in shown
        assert "declare 'static'" not in shown
        assert "generated" not in shown
