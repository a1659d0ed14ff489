"""Runs a system in the foreground until its last process has ended."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from ...protocol.endpoints import host_and_port, is_loopback, separate
from ...protocol.guest_user import GuestUser
from ...protocol.keys import ROLES, KeyFault, KeyFolder, own_key
from ...protocol.settings import Settings
from .. import Client
from .faults import FAILED, WRONG_SETTING, SystemFault
from .processes import started_by
from .screen import Screen, screen_for
from .signals import StopSignals
from .supervisor import Exit, Supervisor
from .watch import Picture, Watcher, is_optional

LOOK_EVERY_S = 0.3
JOIN_PORT = 5556
"""The port for ``join`` if the setting does not contain a port."""

Lines = Sequence[str]


def run_system(settings: Settings, first: Lines, when_ready: Callable[[Client], Lines]) -> int:
    """Runs a system with these settings until it is stopped; returns the exit code.

    The lines ``first`` are printed at the start. When all processes are ready, the lines that
    ``when_ready`` returns are printed. Raises SystemFault if a setting is not valid. If the system
    cannot start, or if a process fails, ends all processes and raises SystemFault.
    """
    supervisor = Supervisor(settings)
    supervisor.check_run_dir()
    check_guest_user(settings)
    if not settings.join:
        check_keys(settings)
        for front in separate(settings.front_endpoint):
            check_address(front, _has_keys(settings))
        check_http(settings)
    with StopSignals() as signals:
        supervisor.start()
        watcher = Watcher(supervisor.control, settings)
        screen = screen_for(settings.front_endpoint)
        try:
            for line in first:
                screen.say(line)
            fault = _watch(supervisor, watcher, screen, signals, when_ready)
            ended = _end(supervisor, watcher, screen, signals)
        finally:
            screen.close()
            watcher.close()
            if supervisor.exit_code() is None or started_by(supervisor.run_dir):
                supervisor.kill()
    if fault is not None:
        raise fault
    print(ended)
    return 0


def joining(settings: Settings) -> Settings:
    """The settings of workers that join the broker of the setting ``join``. Raises SystemFault if
    the address is not valid, or if no worker's key is given."""
    text = settings.join if ":" in settings.join else f"{settings.join}:{JOIN_PORT}"
    try:
        host, port = host_and_port(text)
        key = own_key(settings, "worker")
    except ValueError as error:
        raise SystemFault(f"join: {error}", WRONG_SETTING) from None
    if key is None or key.role != "worker":
        raise SystemFault(
            f"join: workers that connect to {text} need a worker's key; make one there with "
            "'tokenbus keys new NAME --worker', copy NAME.key here, and give its path as the "
            "setting 'key' (TOKENBUS_KEY)",
            WRONG_SETTING,
        )
    return msgspec.structs.replace(settings, back=f"tcp://{host}:{port}", http="none")


def check_keys(settings: Settings) -> None:
    """Raises SystemFault if a key cannot be read, or if other machines could connect to the
    workers' address of a broker that does not use keys."""
    try:
        folder = KeyFolder.of(settings)
        if folder is not None:
            folder.broker()
        for role in ROLES:
            own_key(settings, role)
    except KeyFault as fault:
        raise SystemFault(str(fault), WRONG_SETTING) from None
    for address in separate(settings.back_endpoint):
        back = urlsplit(address)
        if back.scheme == "tcp" and folder is None:
            _check_loopback("back", address, back.hostname or "")


def check_guest_user(settings: Settings) -> None:
    """Raises SystemFault if the processes that run uploaded modules could not run as the user in
    ``guest_user``."""
    if not settings.guest_user:
        return
    if not settings.guest_processes:
        raise SystemFault(
            "guest_user: modules run in separate processes only if the setting guest_processes is "
            "above 0, for example TOKENBUS_GUEST_PROCESSES=64",
            WRONG_SETTING,
        )
    try:
        GuestUser.named(settings.guest_user)
    except ValueError as error:
        raise SystemFault(str(error), WRONG_SETTING) from None


def _has_keys(settings: Settings) -> bool:
    return KeyFolder.of(settings) is not None


def check_address(front: str, has_keys: bool = False) -> None:
    """Raises SystemFault if the broker could not listen on ``front``, or if other machines could
    connect to a broker without keys."""
    parts = urlsplit(front)
    if parts.scheme == "ipc":
        _check_path(front.removeprefix("ipc://"))
        return
    try:
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if parts.scheme != "tcp" or not port:
        raise SystemFault(
            f"front: {front!r} is not a valid address; use one like tcp://127.0.0.1:5555 or "
            "ipc:///path/of/a/socket",
            WRONG_SETTING,
        )
    if not has_keys:
        _check_loopback("front", front, host)
    _check_port("front", host, port, f"--front tcp://{host}:{port + 1}")


def check_http(settings: Settings) -> None:
    """Raises SystemFault if the gateways could not listen on the address in the setting ``http``,
    or if other machines could send requests without API keys. Also raises SystemFault if the file
    of API keys or of TLS does not exist."""
    if settings.http == "none":
        return
    try:
        host, port = host_and_port(settings.http)
    except ValueError as error:
        raise SystemFault(f"http: {error}, or none", WRONG_SETTING) from None
    if not is_loopback(host) and not settings.api_keys:
        raise SystemFault(
            f"http: {settings.http} is not a loopback address, so the gateways need API keys; make "
            "one with 'tokenbus api-key NAME' and add --api-keys FILE, or use 127.0.0.1:8080",
            WRONG_SETTING,
        )
    for name in ("api_keys", "tls_cert", "tls_key"):
        file = getattr(settings, name)
        if file and not Path(file).is_file():
            raise SystemFault(f"{name}: the file {file} does not exist", WRONG_SETTING)
    shown = f"[{host}]" if ":" in host else host
    _check_port("http", host, port, f"--http {shown}:{port + 1}, or --http none")


def _check_port(setting: str, host: str, port: int, other: str) -> None:
    """Raises SystemFault if this process cannot listen on the port. If the port is in use, the
    message suggests ``other``, a flag with a different address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise SystemFault(
                f"port {port} of {host} is in use; choose another port with {other}, or stop the "
                "process that listens on it"
            ) from None
        raise SystemFault(
            f"{setting}: cannot listen on port {port} of {host}: {error.strerror}", WRONG_SETTING
        ) from None


def _check_loopback(setting: str, address: str, host: str) -> None:
    """Raises SystemFault if other machines could connect to a broker without keys."""
    if is_loopback(host):
        return
    raise SystemFault(
        f"{setting}: {address} is not a loopback address, so the broker needs keys; make them with "
        "'tokenbus keys new', or use an address such as tcp://127.0.0.1:5555",
        WRONG_SETTING,
    )


def _check_path(path: str) -> None:
    """Raises SystemFault if a process listens on the Unix socket ``path``, because ZeroMQ would
    replace the socket without an error. Also raises SystemFault if this cannot be checked."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
    except (ConnectionRefusedError, FileNotFoundError):
        return
    except OSError as error:
        raise SystemFault(f"front: cannot listen on ipc://{path}: {error}", WRONG_SETTING) from None
    raise SystemFault(
        f"ipc://{path} is in use; choose another --front, or stop the process that listens on it"
    )


def _watch(
    supervisor: Supervisor,
    watcher: Watcher,
    screen: Screen,
    signals: StopSignals,
    when_ready: Callable[[Client], Lines],
) -> SystemFault | None:
    """Displays the system until a stop signal arrives, a process fails or supervisord ends. Returns
    the fault. Returns None after a stop signal, and if supervisord ended with exit code 0."""
    announced = False
    while not signals.count(wait_s=LOOK_EVERY_S):
        code = supervisor.exit_code()
        if code is not None:
            return None if code == 0 else SystemFault(f"supervisord ended with exit code {code}")
        supervisor.restore_folders()
        picture = watcher.look()
        exits = supervisor.exits()
        fault = _fault(supervisor, picture, exits, announced)
        if fault is not None:
            return fault
        for exited in exits:
            if exited.code != 0:  # A process that was drained exits with code 0.
                screen.say(str(exited))
        screen.show(picture)
        if picture.ready and not announced:
            announced = True
            for line in when_ready(watcher.client()):
                screen.say(line)
    return None


def _fault(
    supervisor: Supervisor, picture: Picture, exits: Sequence[Exit], was_ready: bool
) -> SystemFault | None:
    """The fault that prevents the system from continuing, or None.

    ``was_ready``: whether all processes have been ready at the same time. Before that, each exit of
    a process is a fault. After that, only an exit with code 2 is a fault, because supervisord
    restarts processes with other codes. If a signal killed a process, this is not a fault. If
    supervisord has given up a process, this is always a fault. But a tool worker causes a fault
    only if it exits before all processes have been ready.
    """
    for exited in exits:
        name, code = exited.name, exited.code
        final = code == WRONG_SETTING and not is_optional(name)
        if code is not None and (final or not was_ready):
            why = supervisor.run_dir.last_line(name) or f"its exit code is {code}"
            return SystemFault(f"{name} failed: {why}", code or FAILED)
    if picture.failed is not None:
        why = supervisor.run_dir.last_line(picture.failed) or "its log is empty"
        return SystemFault(f"{picture.failed} failed repeatedly: {why}")
    return None


def _end(supervisor: Supervisor, watcher: Watcher, screen: Screen, signals: StopSignals) -> str:
    """Stops all processes in supervisord's stop order. A further stop signal kills the processes.
    Returns a message for the operator."""
    watcher.ending = True
    if supervisor.exit_code() is None:
        screen.say("stopping: workers finish their requests; press Ctrl-C again to kill them")
    supervisor.stop()
    asked = signals.count()
    while supervisor.exit_code() is None:
        screen.show(watcher.look())
        if signals.count(wait_s=LOOK_EVERY_S) > asked:
            supervisor.kill()
            return "killed: all processes have ended"
    return "stopped: all processes have ended"
