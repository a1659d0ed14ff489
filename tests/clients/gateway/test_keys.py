"""The file of API keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenbus.clients.gateway.users.keys import ApiKeys, KeyFileError


def test_a_file_of_keys_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("ann not-a-hash\n")
    with pytest.raises(
        KeyFileError, match=r"line 1 of .* is not valid; expected a name and a SHA-256"
    ):
        ApiKeys.read(file)
    file.write_text("# nobody\n")
    with pytest.raises(KeyFileError, match="has no API key"):
        ApiKeys.read(file)
