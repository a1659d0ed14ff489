"""If the grammar backend is not compiled, the error names the command that compiles it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenbus.grammars import guest


def test_a_guest_that_is_not_compiled_is_an_error_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guest, "files", lambda _: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"grammar\.wasm is not compiled; run make install"):
        guest.wasm()
