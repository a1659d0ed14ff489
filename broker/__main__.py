"""``python -m tokenbus.broker [NUMBER]`` runs one broker, with settings from the environment and
from the settings file.

If there are several brokers, ``NUMBER`` is the index of this broker, from 0. The settings list the
addresses of all brokers.
"""

from __future__ import annotations

import sys

from ..protocol import logs, tracing
from ..protocol.health_file import HealthFile
from ..protocol.keys import KeyFolder
from ..protocol.settings import SettingError, load
from .garbage import bound_pauses
from .server import BrokerServer
from .settings import BrokerSettings
from .sockets import BindError


def main() -> int:
    """Runs the broker until SIGINT or SIGTERM; returns the exit code."""
    try:
        number = int(sys.argv[1]) if len(sys.argv) > 1 else 0
        settings = load().of_broker(number)
        logs.set_up(settings, "broker")
        tracing.start("broker")
        server = BrokerServer(
            settings.front,
            settings.back_endpoint,
            BrokerSettings.of(settings),
            health=HealthFile(settings),
            keys=KeyFolder.of(settings),
        )
    except (SettingError, BindError, ValueError) as error:
        print(f"tokenbus broker: {error}", file=sys.stderr)
        # supervisord does not restart a process that exits with code 2. If the address is in use,
        # the exit code is 1, because the address may become free.
        return 1 if isinstance(error, BindError) and error.in_use else 2
    bound_pauses()
    server.reserve()
    server.run_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
