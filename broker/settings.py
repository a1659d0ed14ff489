"""The settings of the broker."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from ..protocol.settings import Settings


class BrokerSettings(Struct, frozen=True, kw_only=True):
    """The settings that concern the broker: times in seconds, sizes in bytes."""

    heartbeat_s: float = 1.0
    """Interval of the heartbeats between the broker and each worker."""
    expiry_s: float = 5.0
    """A worker is lost after this time without a message, and its streams move."""
    hung_step_s: float = 60.0
    """A worker is lost if its current step has run for longer than this time."""
    move_wait_s: float = 120.0
    """Maximum time that an accepted request waits while no worker serves its model."""
    ping_s: float = 2.0
    """Interval of PINGs from clients with the capability ``ping``."""
    session_expiry_s: float = 10.0
    """A client with the capability ``ping`` is lost after this time without a message."""
    session_grace_s: float = 5.0
    """Time after which a session without a connection ends, unless its client connects again."""
    max_keep_s: float = 3600.0
    """Upper bound of ``Hello.keep_s``, with which a client extends ``session_grace_s``."""
    session_cut_s: float = 30.0
    """Time for which the session of a lost client waits for a new connection, if the broker has not
    noticed that the old connection closed. This happens, for example, if a network link is cut."""
    recover_s: float = 30.0
    """Time after its start in which a broker adopts the streams of an earlier run that workers
    report."""
    session_idle_s: float = 3600.0
    """Time without streams and messages after which a session ends."""
    max_priority: int = 0
    """The highest priority that a request may have if the broker has no keys."""
    allow_tools: list[str] = []
    """Tools that a client's programs may call, with the wildcards ``*`` and ``?``. Applies to
    clients whose key does not have a list of its own."""
    max_sessions: int = 10_000
    max_queued: int = 10_000
    """Maximum number of requests that wait for a worker, of all models together."""
    max_queued_bytes: int = 1024 * 1024 * 1024
    """Maximum bytes of all waiting requests together, with their attachments and buffers."""
    max_streams: int = 4_096
    """Maximum number of live streams of one session."""
    max_buffer_bytes: int = 64 * 1024 * 1024
    """Maximum bytes of all buffers of one session."""
    max_total_buffer_bytes: int = 1024 * 1024 * 1024
    """Maximum bytes of all buffers of all sessions."""
    max_buffers: int = 4_096
    """Maximum number of buffers of one session."""
    max_journal_bytes: int = 128 * 1024 * 1024
    """Maximum bytes of a session's journal, which the session's streams need to move to another
    worker. With 0 the broker keeps no journals, and streams cannot move."""
    max_total_journal_bytes: int = 1024 * 1024 * 1024
    """Maximum bytes of the journals of all sessions."""
    max_pending_bytes: int = 4 * 1024 * 1024
    """Maximum bytes of messages that wait for a client that does not read. Above this bound, the
    client's streams end."""
    route_by_prefix: bool = True
    """Whether the choice of a worker considers which workers have the beginning of the prompt in
    their cache. If False, each request goes to the least loaded worker."""
    drain_s: float = 30.0
    """Time for which streams may continue after the broker has received a signal to stop."""
    tick_s: float = 0.25
    """Time between two checks of leases and deadlines."""

    @classmethod
    def of(cls, settings: Settings) -> BrokerSettings:
        """Selects the broker's settings from the settings of the system."""
        names = {field.name for field in msgspec.structs.fields(Settings)}
        own = [f.name for f in msgspec.structs.fields(cls) if f.name in names]
        return cls(**{name: getattr(settings, name) for name in own})
