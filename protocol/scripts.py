"""The form of an uploaded script, which clients write and controller workers read."""

from __future__ import annotations

SCRIPT_MARK = b"#!tokenbus "
"""The beginning of the first line of an uploaded script. The language follows in the same line."""
LANGUAGES = {"javascript": (".js", ".mjs"), "python": (".py",)}
"""The languages of scripts, and the suffixes of their files."""
MAX_SCRIPT_BYTES = 1024 * 1024
"""Maximum number of bytes of a script."""


def language_of(suffix: str) -> str | None:
    """The language of a file with this suffix; None if it is not a script."""
    return next((name for name, suffixes in LANGUAGES.items() if suffix in suffixes), None)


def marked_script(text: bytes, language: str) -> bytes:
    """The bytes to upload for a script: a line that names the language, and then the text of the
    script. A text that already begins with ``SCRIPT_MARK`` is not changed."""
    if text.startswith(SCRIPT_MARK):
        return text
    return SCRIPT_MARK + language.encode() + b"\n" + text
