"""``python -m tokenbus.clients.gateway`` runs one gateway process. The settings come from the
environment and the configuration file."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from ...protocol import logs, tracing
from ...protocol.keys import KeyFault, own_key
from ...protocol.settings import SettingError, load
from .connections.lingering import Leaving, run

LINGERS = "--lingers"
"""A command-line argument. With this argument, SIGUSR2 makes the gateway finish its streams while
its successor serves new requests (``lingering.py``)."""


def main() -> int:
    """Runs the gateway until SIGINT, SIGTERM or (with ``LINGERS``) SIGUSR2. Returns the exit
    code."""
    return run(_serve) if LINGERS in sys.argv[1:] else _serve(None)


def _serve(leaving: Leaving | None) -> int:
    try:
        from .app import build
        from .connections.server import BindError, GatewayServer, check_tls, listen
        from .users.keys import ApiKeys, KeyFileError
    except ImportError as error:
        print(
            f"tokenbus gateway: {error}; pip install 'tokenbus[gateway]' installs its packages",
            file=sys.stderr,
        )
        return 2
    try:
        settings = load()
        logs.set_up(settings, "gateway")
        exporter = tracing.start("gateway")
        if exporter is not None:
            from opentelemetry.trace import set_tracer_provider

            set_tracer_provider(exporter.provider)
        if settings.http == "none":
            raise SettingError("http: the setting is 'none'; a gateway needs HOST:PORT")
        fault = check_tls(settings)
        if fault is not None:
            raise SettingError(fault)
        keys = ApiKeys.read(Path(settings.api_keys)) if settings.api_keys else None
        own_key(settings, "client")  # Raises KeyFault if the file is not valid.
        listener = listen(settings)
    except (SettingError, KeyFileError, KeyFault, BindError) as error:
        print(f"tokenbus gateway: {error}", file=sys.stderr)
        # supervisord does not restart a process with the exit code 2. If the address is in use, the
        # exit code is 1, because the address may become free.
        return 1 if isinstance(error, BindError) and error.in_use else 2
    # The tokenizers library distributes the texts of a call over threads. Each call of the gateway
    # has only one text, so threads would not save time.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    server = GatewayServer(build(settings, keys), settings, leaving)
    log = logging.getLogger("tokenbus.gateway")
    scheme = "https" if settings.tls_cert else "http"
    log.info("listening on %s://%s", scheme, settings.http)
    server.run([listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
