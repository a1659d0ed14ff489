"""The commands ``up``, ``down`` and ``serve-model``: their flags and their output."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...protocol.keys import KeyFolder
from ...protocol.settings import Settings
from .faults import NOT_RUNNING, WRONG_SETTING, SystemFault
from .model_check import check_model

if TYPE_CHECKING:
    from .. import Client

Subparsers = Any
"""The type that ``ArgumentParser.add_subparsers`` returns, which argparse does not export."""
Command = Callable[[argparse.Namespace, Settings], int]

DEFAULT_PORT = 5555


def add_command(subparsers: Subparsers) -> None:
    """Adds the three commands. The ``dest`` of a flag is the name of its setting."""
    up = subparsers.add_parser(
        "up",
        allow_abbrev=False,
        help="run a broker and its workers in the foreground",
        description="Runs a broker, workers and gateways under supervisord until Ctrl-C.",
    )
    up.add_argument(
        "--model",
        help="model: folder, GGUF file, name on a hub, 'embedded' (default), or 'auto'",
    )
    up.add_argument("--front", metavar="ADDRESS", help="broker's address for clients")
    up.add_argument("--back", metavar="ADDRESS", help="broker's address for workers")
    up.add_argument("--brokers", metavar="N", help="number of brokers (default: 1)")
    up.add_argument(
        "--join",
        metavar="HOST[:PORT]",
        help="run only workers here, which connect to the broker on HOST with a worker's key",
    )
    up.add_argument(
        "--guest-user",
        dest="guest_user",
        metavar="NAME",
        help="user of the processes that run uploaded modules; needs the right to change users",
    )
    up.add_argument("--key", metavar="FILE", help="key file of the workers, for --join")
    up.add_argument(
        "--rolling",
        action="store_true",
        help="replace every process of the running system, one after another, while it serves",
    )
    up.add_argument(
        "--ray",
        dest="in_ray",
        action="store_true",
        help="run the workers in a Ray cluster; their number follows the load, for example "
        "--gpu-workers 2..16 --controller-workers 2..8",
    )
    up.add_argument("--address", metavar="HOST:PORT", help="Ray cluster (default: auto)")
    _worker_flags(up)
    up.set_defaults(run=_reporting(_up))

    down = subparsers.add_parser(
        "down",
        allow_abbrev=False,
        help="stop a system that runs on this machine",
        description="Stops the system of a run directory. The exit code is 3 if no system runs.",
    )
    down.add_argument("--run-dir", dest="run_dir", metavar="DIR", help="run directory")
    down.add_argument("--port", type=_port, help="port of a system that serve-model started")
    down.add_argument(
        "--ray",
        dest="in_ray",
        action="store_true",
        help="also end workers that are left in a Ray cluster, for example of a killed system",
    )
    down.add_argument("--address", metavar="HOST:PORT", help="Ray cluster (default: auto)")
    down.set_defaults(run=_reporting(_down))

    serve = subparsers.add_parser(
        "serve-model",
        allow_abbrev=False,
        help="run a system that serves one model",
        description="Runs a broker, workers and gateways for one model until Ctrl-C, like LMTP's "
        "command of the same name.",
    )
    serve.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="folder, GGUF file, name on a hub, 'embedded' (default), or 'auto' (load the models "
        "of --allow on demand)",
    )
    serve.add_argument("--cuda", action="store_true", help="short for --device cuda")
    serve.add_argument(
        "--port", type=_port, help=f"port for clients on 127.0.0.1 (default: {DEFAULT_PORT})"
    )
    _worker_flags(serve)
    serve.set_defaults(run=_reporting(_serve_model))


def _worker_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--gpu-workers",
        dest="gpu_workers",
        action=_Range,
        metavar="N",
        help="number of GPU workers (default: 1); with --ray also a range N..M",
    )
    add(
        "--controller-workers",
        dest="controller_workers",
        action=_Range,
        metavar="M",
        help="number of controller workers (default: 1); a state worker runs unless M is 0",
    )
    add(
        "--tool",
        dest="tools",
        action="append",
        metavar="FILE|MODULE",
        help="Python file or module whose functions a tool worker serves; repeatable",
    )
    add(
        "--mcp",
        action="append",
        metavar="COMMAND",
        help="MCP server whose tools a tool worker serves; repeatable",
    )
    add("--http", metavar="HOST:PORT", help="gateways' address, or none (127.0.0.1:8080)")
    add("--gateways", metavar="N", help="number of gateways on that address (default: 1)")
    add("--api-keys", dest="api_keys", metavar="FILE", help="file with hashes of API keys")
    add(
        "--operator-over-http",
        dest="operator_over_http",
        action="store_const",
        const=True,
        help="without API keys, let HTTP requests of this machine pause models and update weights",
    )
    add("--tls-cert", dest="tls_cert", metavar="FILE", help="gateways' certificate, for HTTPS")
    add("--tls-key", dest="tls_key", metavar="FILE", help="private key of the certificate")
    add(
        "--cors",
        action="append",
        metavar="ORIGIN",
        help="web origin whose pages may send requests to the gateways; repeatable",
    )
    add(
        "--served-model-name",
        dest="served_model_name",
        action="append",
        metavar="NAME[=MODEL]",
        help="further name of a model over HTTP, for example 'claude-*' for the default model or "
        "gpt-4o=my-model; repeatable",
    )
    add(
        "--trust-request-chat-template",
        dest="trust_request_chat_template",
        action="store_const",
        const=True,
        help="render chat templates that HTTP requests contain",
    )
    add("--device", help="auto (default), cpu, cuda, cuda:1")
    add("--dtype", help="auto (default), float32, bfloat16, float16")
    add(
        "--quantize",
        metavar="KIND",
        help="quantize the weights to int8 or int4 when the model is loaded (default: none)",
    )
    add(
        "--lora",
        action="append",
        metavar="NAME=FOLDER",
        help="LoRA adapter in PEFT's layout, which requests choose by NAME; repeatable",
    )
    add(
        "--allow",
        action="append",
        metavar="PATTERN",
        help="names or paths of models to load on demand, with * and ?; repeatable",
    )
    add(
        "--draft-model",
        dest="draft_model",
        metavar="MODEL",
        help="small model with the same tokenizer, for speculative decoding (default: none)",
    )
    add(
        "--max-models",
        dest="max_models",
        metavar="N",
        help="maximum number of loaded models per worker (default: 2)",
    )
    add("--tp", metavar="N", help="devices per worker, for tensor parallelism (default: 1)")
    add("--threads", metavar="N", help="CPU threads per worker (default: the fastest number)")
    add("--run-dir", dest="run_dir", metavar="DIR", help="folder of sockets and logs")
    add(
        "--log-level",
        dest="log_level",
        metavar="LEVEL",
        help="debug, info (default), warning, error",
    )
    add("--log-format", dest="log_format", metavar="F", help="human (default), json")
    add(
        "--compile",
        action="store_const",
        const=True,
        help="run models with torch.compile",
    )
    add(
        "--trust-remote-code",
        dest="trust_remote_code",
        action="store_const",
        const=True,
        help="allow checkpoints to run their own Python code",
    )


class _Range(argparse.Action):
    """The action of a flag whose value is a number ``N`` or a range ``N..M``. Both set the setting
    ``DEST`` to ``N``. A range also sets the setting ``max_DEST`` to ``M``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Splits the value. ``Settings`` refuses a value that is not a number."""
        minimum, dots, maximum = str(values).partition("..")
        setattr(namespace, self.dest, minimum)
        if dots:
            setattr(namespace, f"max_{self.dest}", maximum)


def _reporting(command: Command) -> Command:
    """Wraps ``command``: a SystemFault becomes one line on stderr, and its ``exit_code`` becomes
    the exit code."""

    def run(args: argparse.Namespace, settings: Settings) -> int:
        try:
            return command(args, settings)
        except SystemFault as fault:
            print(f"tokenbus: {fault}", file=sys.stderr)
            return fault.exit_code

    return run


def _up(args: argparse.Namespace, settings: Settings) -> int:
    from .rolling import roll
    from .run_dir import RunDir
    from .up import joining, run_system

    if args.rolling:
        return roll(settings)
    settings = _with_ray(args, settings)
    _check_ray(settings)
    if settings.join:
        settings = joining(_with_what_is_installed(msgspec.structs.replace(settings, http="none")))
        lines = [f"starting workers for {settings.back}; logs are in {RunDir.of(settings).logs}"]
        check_model(settings)
        return run_system(settings, lines, lambda _: ["ready: the workers run"])
    settings = _with_what_is_installed(settings)

    def when_ready(client: Client) -> list[str]:
        return [
            f"ready: clients connect to {settings.front_endpoint}",
            *_http_lines(settings),
            f"try:   {example(settings)}",
        ]

    check_model(settings)
    return run_system(settings, [f"starting; logs are in {RunDir.of(settings).logs}"], when_ready)


def _serve_model(args: argparse.Namespace, settings: Settings) -> int:
    from .up import run_system

    _check_ray(settings)
    settings = _with_what_is_installed(settings)
    port = args.port or DEFAULT_PORT
    settings = msgspec.structs.replace(
        settings,
        front=f"tcp://127.0.0.1:{port}",
        run_dir=settings.run_dir or _port_dir(port),
        device="cuda" if args.cuda else settings.device,
    )
    check_model(settings)
    on_demand = settings.model == "auto"
    running = [f"======== Running on {settings.front} ========", "(Press CTRL+C to quit)"]

    def when_ready(client: Client) -> list[str]:
        lines = [*running, *_http_lines(settings)]
        if on_demand:
            return [*lines, f"[Loading on demand: {', '.join(settings.allow)}]"]
        info = client.model_info(settings.model)
        return [*lines, f"[{settings.model} ready on device {info.device}]"]

    first = [] if on_demand else [f"[Loading {settings.model}]"]
    return run_system(settings, first, when_ready)


def _down(args: argparse.Namespace, settings: Settings) -> int:
    from .down import end_system

    if args.port is not None and not settings.run_dir:
        settings = msgspec.structs.replace(settings, run_dir=_port_dir(args.port))
    settings = _with_ray(args, settings)
    if not settings.ray:
        return end_system(settings)
    from ..cluster.leftovers import end_in_ray

    try:
        end_system(settings)
    except SystemFault as fault:
        if fault.exit_code != NOT_RUNNING or not end_in_ray(settings):
            raise
    else:
        end_in_ray(settings)
    return 0


def _with_ray(args: argparse.Namespace, settings: Settings) -> Settings:
    """The settings, with the Ray cluster that the flags ``--ray`` and ``--address`` name."""
    if not args.in_ray and not args.address:
        return settings
    return msgspec.structs.replace(settings, ray=args.address or settings.ray or "auto")


def _http_lines(settings: Settings) -> list[str]:
    """Lines with the addresses of the gateways."""
    if settings.http == "none":
        return []
    scheme = "https" if settings.tls_cert else "http"
    base = f"{scheme}://{settings.http}"
    return [f"http:  chat at {base}, console at {base}/console, APIs at {base}/v1"]


def _with_what_is_installed(settings: Settings) -> Settings:
    """The settings, but without controller workers if wasmtime is not installed, and without
    gateways if Starlette is not installed."""
    if settings.http != "none" and find_spec("starlette") is None:
        print(
            "tokenbus: no gateway starts, because starlette is not installed; "
            "pip install 'tokenbus[gateway]' installs it",
            file=sys.stderr,
        )
        settings = msgspec.structs.replace(settings, http="none")
    if settings.controller_workers and find_spec("wasmtime") is None:
        print(
            "tokenbus: no controller worker starts, because wasmtime is not installed; "
            "pip install 'tokenbus[controller]' installs it",
            file=sys.stderr,
        )
        return msgspec.structs.replace(settings, controller_workers=0)
    return settings


def _check_ray(settings: Settings) -> None:
    """Raises SystemFault if the settings of a Ray cluster contradict each other, or if Ray is not
    installed."""
    if settings.ray and settings.join:
        raise SystemFault(
            f"join: --join {settings.join} and --ray exclude each other, because --ray needs a "
            "broker on this machine; leave out one of them",
            WRONG_SETTING,
        )
    for kind in ("gpu_workers", "controller_workers"):
        minimum, maximum = getattr(settings, kind), getattr(settings, f"max_{kind}")
        if maximum and not settings.ray:
            raise SystemFault(
                f"{kind}: {minimum}..{maximum} needs a Ray cluster; add --ray, or give one number",
                WRONG_SETTING,
            )
        if maximum and maximum < minimum:
            raise SystemFault(
                f"{kind}: the minimum of {minimum}..{maximum} exceeds the maximum; use "
                f"{maximum}..{minimum}",
                WRONG_SETTING,
            )
    if settings.ray and find_spec("ray") is None:
        raise SystemFault(
            "ray: the package is not installed; pip install 'tokenbus[ray]' installs it",
            WRONG_SETTING,
        )


def _port_dir(port: int) -> str:
    """The run directory of a system that serve-model starts. The system at the default port has the
    default run directory. For each other port, there is a separate run directory."""
    name = f"tokenbus-{os.getuid()}" + (f"-{port}" if port != DEFAULT_PORT else "")
    return str(Path(tempfile.gettempdir()) / name)


def example(settings: Settings) -> str:
    """A shell command that generates text with the system of these settings, for the user to enter
    in another terminal."""
    front = settings.front_endpoint
    where = "" if front == Settings().front else f" --front {shlex.quote(front)}"
    found = shutil.which("tokenbus")
    program = "tokenbus" if found else str(Path(sys.executable).parent / "tokenbus")
    key = KeyFolder(settings.keys_folder).own("client")
    # Programs find a key in the default folder without a setting.
    elsewhere = key.exists() and key != KeyFolder(Settings().keys_folder).own("client")
    with_key = f"TOKENBUS_KEY={shlex.quote(os.path.abspath(key))} " if elsewhere else ""
    return f"{with_key}{program} generate 'def add(a, b):'{where}"


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; use a number from 1 to 65535")
    return int(text)
