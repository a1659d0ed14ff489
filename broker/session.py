"""The sessions of clients, and the table of all sessions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from ..protocol.bodies import Encoding
from ..protocol.header import Flag
from ..protocol.ids import session_id
from ..protocol.messages import CARRIES_USERS, Hello
from ..protocol.pace import Pace
from .recent import Recent
from .stream_log import StreamLog
from .unread import UnreadAnswers

if TYPE_CHECKING:
    from .request import Request


@dataclass(slots=True, eq=False)
class KeyUse:
    """The resources that all sessions of one key use together: waiting requests, their bytes, and
    the bytes of buffers. Each session without a key has its own ``KeyUse``."""

    queued: int = 0
    queued_bytes: int = 0
    buffer_bytes: int = 0
    lists_until: float = 0.0
    """A time in seconds. Each listing of streams moves it further into the future. While it is more
    than ``MAX_LISTED_S`` in the future, further listings are refused (``check_lists`` in
    ``status.py``)."""


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """The broker's record of a client, which survives the loss of the client's connection.

    The fields that each TOKEN needs come first, next to each other, so that one access to memory
    loads them. With many sessions, a session is rarely in the processor's cache.
    """

    peer: bytes | None
    """The routing id of the session's connection; None without a connection."""
    alive: bool = True
    """Whether the session is in the ``SessionTable``."""
    bodies: bool = False
    """Whether the client accepts several bodies in one TOKEN."""
    id: int
    token: str
    """The session's secret token. If only workers have reported the session to a restarted broker,
    the token is empty until the client connects."""
    key: str
    """The client's CURVE public key; empty without CURVE."""
    encoding: Encoding
    last_seen: float
    recovering: bool = False
    """Whether the client has brought the session from an earlier run of the broker, or from another
    broker. Workers may then report streams of the session."""
    greeted: bool = False
    """Whether the client has sent HELLO to this or an earlier broker. Only such a session outlives
    its connection."""
    carries_users: bool = False
    """Whether the client is a gateway. A gateway sends the requests of its users, who must not get
    the operator's rights."""
    recovers: bool = False
    """Whether the client can continue the session's streams at another broker, which adopts
    them."""
    pings: bool = False
    """Whether the client sends PINGs. If so, a silent client counts as lost."""
    columns: bool = False
    """Whether the client accepts TOKEN in columns (``protocol/columns.py``)."""
    texts: bool = False
    """Whether the client accepts columns that include the text of each token."""
    client: str = ""
    detached_at: float | None = None
    """The time at which the session lost its connection, in seconds; None while the session has a
    connection."""
    probed: float | None = None
    """The value of ``last_seen`` when the broker last checked the connection of the silent client;
    None before the first check."""
    cut: bool = False
    """Whether the broker has removed the connection because the client was silent. The client may
    still run."""
    displaced: bool = False
    """Whether another broker has claimed streams of the session while its client was connected to
    this broker. RELEASED sets the flag. At the client's next HELLO, this broker claims the streams
    back and clears the flag."""
    streams: dict[int, Request] = field(default_factory=dict)
    """The session's live streams, by their ``stream_id``."""
    withdrawn: dict[int, int] = field(default_factory=dict)
    """The streams that ``Adoption.pick_up`` has removed, by request, until workers have reported
    them or have answered the claim. They count towards the bounds of live streams."""
    buffers: dict[str, bytes] = field(default_factory=dict)
    buffer_bytes: int = 0
    queued: int = 0
    """Number of the session's requests that wait for a worker."""
    queued_bytes: int = 0
    lists_until: float = 0.0
    """As in ``KeyUse``, for a session that serves several users."""
    use: KeyUse = field(default_factory=KeyUse)
    """The ``KeyUse`` of the session's key, which all sessions of the key share. ``SessionTable``
    sets this field."""
    pace: Pace = field(default_factory=Pace)
    """Rate at which the session's streams end."""
    log: StreamLog = field(init=False)
    """The bodies of the session's streams, and the ends that the client may not have received.
    ``SessionTable`` makes the log."""
    keep_s: float = 0.0
    """Minimum number of seconds for which the session waits for its client (``Hello.keep_s``)."""
    acks: bool = False
    """Whether the session's client acknowledges the ends that it has received."""

    def greet(self, hello: Hello, encoding: Encoding, now: float) -> None:
        """Records the contents of the client's HELLO."""
        capabilities = hello.capabilities
        self.greeted = True
        self.displaced = False
        self.encoding = encoding
        self.recovers = "recover" in capabilities
        self.acks = "ack" in capabilities
        self.pings = "ping" in capabilities
        self.carries_users = CARRIES_USERS in capabilities
        self.columns = encoding == "msgpack" and "columns" in capabilities
        self.texts = self.columns and "text_columns" in capabilities
        self.bodies = encoding == "msgpack" and "bodies" in capabilities
        self.client = hello.client
        self.last_seen = now

    @property
    def granted(self) -> list[str]:
        """The optional capabilities that the broker grants to the client."""
        optional = {
            "columns": self.columns,
            "text_columns": self.texts,
            "bodies": self.bodies,
            "ack": self.acks,
        }
        return [name for name, given in optional.items() if given]

    @property
    def num_live(self) -> int:
        """Number of the session's streams that are live, or that a worker may still report."""
        return len(self.streams) + len(self.withdrawn)

    @property
    def owner(self) -> int:
        """A number that stands for the client's key or, without a key, for the session. Workers use
        it to let clients take turns."""
        return session_id("", self.key) if self.key else self.id

    @property
    def tenant(self) -> bytes:
        """The tenant whose modules the session may use: the client's key. Clients without a key
        share one tenant, whose name is empty."""
        return self.key.encode()

    @property
    def flags(self) -> int:
        """The header bits for the encoding of the bodies of this session."""
        if self.encoding == "json":
            return 0
        if not self.columns:
            return Flag.MSGPACK
        return Flag.MSGPACK | Flag.COLUMNS | (Flag.TEXTS if self.texts else 0)


class SessionTable:
    """The sessions, by id and by connection.

    Each session is in ``by_id``, and in ``by_peer`` only while it has a connection. Only this class
    changes ``session.peer``.
    """

    def __init__(self, recent: Recent) -> None:
        self._recent = recent
        self.by_id: dict[int, Session] = {}
        self.by_peer: dict[bytes, Session] = {}
        self._by_key: dict[str, dict[int, Session]] = {}
        """By key: the sessions of its clients. Sessions without a key are not in this dict."""
        self._uses: dict[str, KeyUse] = {}
        """The ``KeyUse`` of each key that has a session."""
        self.unread = UnreadAnswers()

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Session]:
        """Iterates over a copy, so that sessions can be removed meanwhile."""
        return iter(list(self.by_id.values()))

    def add(self, session: Session) -> None:
        """Adds a new session, and its connection if it has one."""
        session.log = StreamLog(self._recent, session.id)
        self.by_id[session.id] = session
        self._add_key(session)
        if session.peer is not None:
            self.by_peer[session.peer] = session

    def remove(self, session: Session) -> None:
        """Removes a session that ends."""
        session.alive = False
        self.by_id.pop(session.id, None)
        self._remove_key(session)
        self.detach(session)

    def claim(self, session: Session, token: str, key: str) -> None:
        """Records the token and the key of a session whose client has now connected. Workers had
        reported the session without its token and key."""
        self._remove_key(session)
        session.token, session.key = token, key
        self._add_key(session)

    def of(self, token: str, key: str) -> Session | None:
        """Returns the session that a client with this key has with this token. Returns None if
        there is no such session, or if its client has not connected yet. Clients with different
        keys may have sessions with the same token."""
        session = self.by_id.get(session_id(token, key))
        return session if session is not None and session.token == token else None

    def of_key(self, key: str) -> list[Session]:
        """The sessions of the clients whose key is ``key``."""
        return list(self._by_key.get(key, {}).values())

    def some(self, key: str, number: int) -> list[Session]:
        """Up to ``number`` sessions of the clients whose key is ``key``, or of all clients if
        ``key`` is empty. The next call returns other sessions, until all sessions were
        returned."""
        sessions = self._by_key.get(key, {}) if key else self.by_id
        found = list(islice(sessions.values(), number))
        for session in found:
            sessions[session.id] = sessions.pop(session.id)
        return found

    def num_of_key(self, key: str) -> int:
        """The number of sessions of the clients whose key is ``key``."""
        return len(self._by_key.get(key, ()))

    def keys(self) -> dict[str, int]:
        """The number of sessions of each key."""
        return {key: len(sessions) for key, sessions in self._by_key.items()}

    def _add_key(self, session: Session) -> None:
        if session.key:
            self._by_key.setdefault(session.key, {})[session.id] = session
            use = self._uses.setdefault(session.key, KeyUse())
            use.queued += session.queued
            use.queued_bytes += session.queued_bytes
            use.buffer_bytes += session.buffer_bytes
            session.use = use

    def _remove_key(self, session: Session) -> None:
        same = self._by_key.get(session.key)
        if same is not None:
            same.pop(session.id, None)
            if not same:
                del self._by_key[session.key], self._uses[session.key]

    def attach(self, session: Session, peer: bytes) -> None:
        """Gives a session the connection ``peer`` instead of its earlier one, if any."""
        self.detach(session)
        session.peer = peer
        self.by_peer[peer] = session

    def detach(self, session: Session) -> None:
        """Removes the connection of a session."""
        if session.peer is not None:
            self.by_peer.pop(session.peer, None)
            session.peer = None
