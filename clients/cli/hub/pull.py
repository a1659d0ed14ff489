"""``tokenbus pull``: downloads a model from a hub."""

from __future__ import annotations

import argparse
from typing import Any

from rich.filesize import decimal

from ....protocol.hub_names import HubName, HubNameError
from ....protocol.settings import Settings
from ..exits import OK, counted
from .faults import check_installed


def add_command(commands: Any) -> None:
    """Adds ``pull``."""
    parser = commands.add_parser(
        "pull",
        allow_abbrev=False,
        help="download a model from a hub",
        description="Downloads the safetensors files, the configuration and the tokenizer of a "
        "model into the cache of huggingface_hub, where --model NAME finds them. A broken "
        "connection is resumed. HF_ENDPOINT, HF_HUB_CACHE and HF_TOKEN choose the hub, the folder "
        "and the account.",
    )
    parser.add_argument(
        "hub_name",
        type=_pulled_name,
        metavar="NAME",
        help="ORG/NAME, ORG/NAME@REVISION or ORG/NAME/FILE.gguf",
    )
    parser.set_defaults(run=run)


def hub_name(text: str) -> HubName:
    """Parses the name of a model. argparse calls this function as a ``type``, and adds the
    argument's name to errors."""
    try:
        return HubName.parse(text)
    except HubNameError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _pulled_name(text: str) -> HubName:
    name = hub_name(text)
    if "/" not in name.repository:
        raise argparse.ArgumentTypeError(
            f"{text!r} has no organization; expected ORG/NAME, for example Qwen/Qwen3-0.6B"
        )
    return name


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Downloads one model, and prints its folder."""
    check_installed()
    from .download import Hub

    hub = Hub()
    found = hub.missing(args.hub_name)
    folder = hub.download(found)
    files = f"{counted(found.missing, 'file')} ({decimal(found.missing_bytes)})"
    done = f"downloaded {files} to" if found.missing else "all files are in"
    print(f"{found.name}, commit {found.commit[:8]}: {done} {folder}")
    return OK
