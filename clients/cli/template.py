"""``tokenbus template check``: shows the effect of a chat template on the messages of agents."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from ...protocol.messages import TokenizerFiles
from ...protocol.settings import Settings
from .exits import FAILED, OK
from .module_files import FileFault
from .options import add_connection, client_for


def add_command(commands: Any) -> None:
    """Adds ``template`` with its subcommand."""
    parser = commands.add_parser(
        "template",
        allow_abbrev=False,
        help="show the effect of a chat template",
        description="Shows the effect of chat templates on the messages of agents.",
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    check = actions.add_parser(
        "check",
        allow_abbrev=False,
        help="render messages in unusual orders",
        description="Renders messages in unusual orders with a model's template, and shows how the "
        "gateway arranges messages that the template refuses. The exit code is 1 if the template "
        "refuses a conversation in every order.",
    )
    check.add_argument(
        "template_model",
        metavar="MODEL",
        help="folder of a checkpoint, file of a Jinja template, or name of a served model",
    )
    check.add_argument("--text", action="store_true", help="print the rendered prompts")
    add_connection(check)
    check.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Prints the effects of one template; returns the exit code."""
    try:
        from ..gateway.templates.template_check import findings
    except ImportError as error:
        raise FileFault(f"{error}; pip install 'tokenbus[gateway]' installs the packages") from None
    found = asyncio.run(findings(_files(args.template_model, settings)))
    width = max(len(one.case) for one in found)
    for one in found:
        print(f"{one.case:{width}}  {'; '.join(one.effects)}")
        if one.refused:
            print(f"{'':{width}}  {one.refused}")
        if args.text and one.text:
            print("\n".join(f"{'':{width}}  | {line}" for line in one.text.splitlines()))
    return FAILED if any(one.refused for one in found) else OK


def _files(name: str, settings: Settings) -> TokenizerFiles:
    """The template of the path ``name``. If this path does not exist, ``name`` is the name of a
    served model. Raises FileFault if a file cannot be read or is not valid."""
    path = Path(name)
    if not _exists(path):
        if name.startswith(("/", "./", "../", "~")):
            raise FileFault(f"{name} does not exist; give a folder, a file or a served model")
        with client_for(settings) as client:
            return client.tokenizer(name)
    try:
        if path.is_file():
            return TokenizerFiles(fingerprint="", json="", chat_template=path.read_text())
        return _of_folder(path)
    except OSError as error:
        raise FileFault(f"cannot read {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise FileFault(f"{path} has a file that is not valid: {error}") from None


def _exists(path: Path) -> bool:
    """Whether a path exists. A name that is too long for a path does not exist."""
    try:
        return path.exists()
    except OSError:
        return False


def _of_folder(folder: Path) -> TokenizerFiles:
    """The template and the special tokens of a checkpoint, as transformers reads them."""
    config = folder / "tokenizer_config.json"
    given: dict[str, Any] = json.loads(config.read_text()) if config.exists() else {}
    separate = folder / "chat_template.jinja"
    template = separate.read_text() if separate.exists() else given.get("chat_template", "")
    if isinstance(template, list):
        named = {one["name"]: one["template"] for one in template}
        template = named.get("default", "")
    special = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in given.items()
        if key.endswith("_token") and isinstance(value, str | dict)
    }
    return TokenizerFiles(
        fingerprint="", json="", chat_template=template or "", special_tokens=special
    )
