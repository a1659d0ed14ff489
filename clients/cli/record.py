"""``tokenbus record``: streams the continuation of a prompt, and writes the stream to a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...protocol.settings import Settings
from ..recording import Recorder
from .generate import begin
from .module_files import check_writable, is_file, read_module, text_or_file
from .notices import Notices
from .options import add_parameters, add_request, client_for, given_text, parameters
from .texts import Texts, exit_code


def add_command(commands: Any) -> None:
    """Adds ``record``."""
    parser = commands.add_parser(
        "record",
        allow_abbrev=False,
        help="stream a prompt and write the stream to a file",
        description="Streams the continuation of a prompt. Writes the request, its results and "
        "everything that they depend on to FILE, even if the stream fails. 'tokenbus replay FILE' "
        "runs the request again.",
    )
    parser.add_argument("file", metavar="FILE", help="the recording")
    parser.add_argument("prompt", nargs="*", help="text")
    add_request(parser)
    add_parameters(parser)
    parser.add_argument(
        "--controller",
        metavar="NAME|FILE",
        help="controller: a name, or a file (as in 'controller run') that is uploaded and recorded",
    )
    parser.add_argument(
        "--arg", "--controller-arg", metavar="TEXT|@FILE", help="argument of the controller"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Streams and records; returns the exit code. Raises FileFault if a file cannot be used."""
    options = parameters(args)
    check_writable(args.file)
    wasm = None
    if args.controller is not None:
        options["controller"] = args.controller
        if is_file(args.controller):
            wasm = read_module(Path(args.controller))
    if args.arg is not None:
        options["controller_arg"] = text_or_file("--arg", args.arg)
    prompt = given_text(args.prompt)
    with client_for(settings) as client, Notices() as notices:
        if wasm is not None:
            options["controller"] = client.upload_controller(wasm).module
        options["record"] = Recorder(args.file, wasm)
        stream = begin(client, prompt, args.request_model, options, notices)
        texts = Texts(stream, notices)
        try:
            texts.follow()
        finally:
            texts.end()
        return exit_code(stream.sequences)
