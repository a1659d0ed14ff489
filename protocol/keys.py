"""Key files. They determine which clients and workers may connect to a broker.

The broker and each of its clients and workers have a key pair of CURVE (curve25519,
http://curvezmq.org). A *key file* contains the pair of one holder and the public key of the broker.
A *key folder*, on the broker's machine, contains the key files of this machine, and a file for each
public key that may connect:

    broker.key                 the broker's pair
    local-client.key           the pair of clients on this machine: tokenbus, the gateways
    local-worker.key           the pair of the workers on this machine
    clients/NAME.toml          a client's public key and its quotas
    workers/NAME.toml          a worker's public key

All files have mode 0600. A file in ``clients/`` or ``workers/`` is replaced as a whole, so that the
broker never reads half of a file. A key file is never overwritten.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta, Struct

from .decoders import convert
from .settings import Settings

Role = Literal["client", "worker"]
ROLES: tuple[Role, ...] = get_args(Role)
PublicKey = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
"""A key of 32 bytes, in hexadecimal."""
Bound = Annotated[int, Meta(ge=1)]

LOCAL = "local"
"""The name of the keys of the broker's own machine."""
BROKER = "broker.key"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class KeyFault(ValueError):
    """A key, its file or its folder cannot be used. The message gives the reason."""


class KeyPair(Struct, frozen=True):
    """A public key and its secret key, both in hexadecimal."""

    public: PublicKey
    secret: PublicKey


class OwnKey(Struct, frozen=True, kw_only=True):
    """The content of a key file: the key pair of a holder, and the broker's public key. The holder
    checks that the broker has this key."""

    name: str
    role: Literal["client", "worker", "broker"]
    public: PublicKey
    secret: PublicKey
    broker: PublicKey

    @classmethod
    def read(cls, path: Path) -> OwnKey:
        """Reads a key file. Raises KeyFault if the file is not a valid key file, or if other users
        may read it."""
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise KeyFault(f"cannot read the key {path}: {error.strerror}") from None
        if mode & 0o077:
            raise KeyFault(
                f"the key {path} is open to other users (mode {stat.S_IMODE(mode):o}); "
                f"chmod 600 {path}, and make another key if somebody may have read it"
            )
        key: OwnKey = _read(path, cls)
        return key

    def write(self, path: Path) -> None:
        """Writes a new file; raises KeyFault if the file exists already."""
        text = (
            f"# A key of Tokenbus. Whoever has this file can connect as the {self.role} "
            f"{self.name!r}: keep it secret.\n"
        )
        for name in self.__struct_fields__:
            text += f'{name} = "{getattr(self, name)}"\n'
        try:
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(text)
        except FileExistsError:
            raise KeyFault(f"the key {path} exists; remove it, or name another file") from None
        except OSError as error:
            raise KeyFault(f"cannot write the key {path}: {error.strerror}") from None


class Quotas(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The quotas of a tenant. If a quota is None, only the general bounds of the broker and the
    workers apply."""

    streams: Bound | None = None
    """Maximum number of live streams, in all sessions of the tenant together."""
    tokens_per_minute: Bound | None = None
    """Maximum number of generated tokens in a minute."""
    upload_bytes: Bound | None = None
    """Maximum size of the tenant's controller modules in bytes, including their compiled forms."""
    variable_bytes: Bound | None = None
    """Maximum size of the variables of all live requests of the tenant together, in bytes."""
    sandbox_ms_per_minute: Bound | None = None
    """Maximum CPU time of the tenant's controllers in a minute, in milliseconds."""
    max_priority: Annotated[int, Meta(ge=1, le=100)] | None = None
    """The highest priority that the tenant's requests may have. None stands for 100 if the tenant
    is an operator, otherwise for 0."""


class Allowed(Quotas, frozen=True, kw_only=True, omit_defaults=True):
    """A public key that may connect, and the rights of its holder."""

    public: PublicKey
    operator: bool = False
    """Whether this client may send the messages of operators (``OPERATOR_MESSAGES``), and see the
    streams of all clients."""
    tools: list[str] | None = None
    """Names of the tools that the programs of this client may call; ``*`` and ``?`` match as in a
    shell. If None, the setting ``allow_tools`` applies."""


class KeyFolder:
    """The folder of a broker's keys."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, settings: Settings) -> KeyFolder | None:
        """The key folder of these settings. None if the setting ``keys`` is empty and the run
        directory does not have a key folder. Raises KeyFault if the setting names a folder that
        does not contain the broker's key."""
        folder = cls(settings.keys_folder)
        if (folder.path / BROKER).exists():
            return folder
        if settings.keys:
            raise KeyFault(f"keys: {folder.path} has no {BROKER}; 'tokenbus keys new' makes one")
        return None

    def own(self, role: Role) -> Path:
        """The path of the key file of this machine's clients or workers."""
        return self.path / f"{LOCAL}-{role}.key"

    def broker(self) -> OwnKey:
        """The broker's own key. Raises KeyFault if its file cannot be used."""
        return OwnKey.read(self.path / BROKER)

    def make(self, new_pair: Callable[[], KeyPair]) -> bool:
        """Creates the folder with the keys of this machine, unless the folder exists. Returns
        whether the folder was created.

        Raises KeyFault if the folder or a file cannot be written.
        """
        if (self.path / BROKER).exists():
            return False
        try:
            # If the parent folder, such as a run directory, does not exist yet, it is created with
            # access for this user only.
            for folder in (self.path.parent, self.path, *map(self._folder, ROLES)):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise KeyFault(f"cannot make the folder {self.path}: {error.strerror}") from None
        pair = new_pair()
        broker = OwnKey(
            name="broker", role="broker", public=pair.public, secret=pair.secret, broker=pair.public
        )
        for role in ROLES:
            key = self.issue(LOCAL, role, new_pair(), pair.public)
            with contextlib.suppress(FileNotFoundError):
                self.own(role).unlink()  # An earlier call may have failed and left this file.
            key.write(self.own(role))
            self._write(role, LOCAL, Allowed(public=key.public, operator=role == "client"))
        # The broker's key is written last, because the folder counts as complete when this file
        # exists.
        broker.write(self.path / BROKER)
        return True

    @staticmethod
    def issue(name: str, role: Role, pair: KeyPair, broker: str) -> OwnKey:
        """The content of a holder's key file; raises KeyFault for an invalid name."""
        check_name(name)
        return OwnKey(name=name, role=role, public=pair.public, secret=pair.secret, broker=broker)

    def allow(self, role: Role, name: str, allowed: Allowed) -> None:
        """Allows a public key to connect as a client or as a worker, under this name. Replaces an
        earlier entry of the name.

        Raises KeyFault if another name has this key, because a key belongs to one holder in one
        role.
        """
        check_name(name)
        for other_role in ROLES:
            for other, entry in self.allowed(other_role).items():
                if entry.public == allowed.public and (other_role, other) != (role, name):
                    raise KeyFault(
                        f"this key is already allowed as the {other_role} {other!r}; "
                        f"revoke {other!r} first, or make another key for {name!r}"
                    )
        self._write(role, name, allowed)

    def revoke(self, name: str, role: Role | None = None) -> list[Role]:
        """Removes the rights of a name; returns the roles in which the name could connect. Raises
        KeyFault if the name could not connect."""
        check_name(name)
        roles = [r for r in ROLES if role in (None, r) and self._file(r, name).exists()]
        if not roles:
            known = sorted({*self.allowed("client"), *self.allowed("worker")})
            raise KeyFault(
                f"{name!r} is not an allowed {role or 'client or worker'}; the allowed names: "
                f"{', '.join(known) or 'none'}"
            )
        for found in roles:
            self._file(found, name).unlink()
        return roles

    def allowed(self, role: Role, faults: list[KeyFault] | None = None) -> dict[str, Allowed]:
        """The keys that may connect in a role, by name.

        Raises KeyFault if a file is not valid. If ``faults`` is given, adds the error to ``faults``
        instead, and leaves out the key of this file.
        """
        found = {}
        for path in sorted(self._folder(role).glob("*.toml")):
            try:
                found[path.stem] = _read(path, Allowed)
            except KeyFault as fault:
                if faults is None:
                    raise
                faults.append(fault)
        return found

    def folders(self) -> list[Path]:
        """The folders of allowed keys. Their modification times change when ``allow`` or ``revoke``
        changes a file."""
        return [self._folder(role) for role in ROLES]

    def _folder(self, role: Role) -> Path:
        return self.path / f"{role}s"

    def _file(self, role: Role, name: str) -> Path:
        return self._folder(role) / f"{name}.toml"

    def _write(self, role: Role, name: str, allowed: Allowed) -> None:
        lines = []
        for field, value in msgspec.to_builtins(allowed).items():
            # A JSON list of texts is a TOML array too.
            shown = json.dumps(value) if not isinstance(value, bool) else str(value).lower()
            lines.append(f"{field} = {shown}\n")
        path = self._file(role, name)
        new = path.with_suffix(f".{os.getpid()}")
        try:
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                file.writelines(lines)
            os.replace(new, path)
        except OSError as error:
            raise KeyFault(f"cannot write {path}: {error.strerror}") from None


def own_key(settings: Settings, role: Role) -> OwnKey | None:
    """The key with which a program connects. It is in the key file of the setting ``key`` or, if
    the setting is empty, in this machine's key file.

    None if the setting is empty and this machine has no key file; the program then connects without
    a key. Raises KeyFault if the key file cannot be used.
    """
    if settings.key:
        return OwnKey.read(Path(settings.key))
    local = KeyFolder(settings.keys_folder).own(role)
    return OwnKey.read(local) if local.exists() else None


def check_name(name: str) -> None:
    """Raises KeyFault if ``name`` is not a valid name of a key."""
    if NAME.fullmatch(name) is None:
        raise KeyFault(
            f"{name!r} is not a valid name of a key; use up to 64 letters, digits, '.', '_' and "
            "'-'; the first must be a letter or a digit"
        )


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        return convert(tomllib.loads(path.read_text(encoding="utf-8")), kind)
    except OSError as error:
        raise KeyFault(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise KeyFault(f"{path} is not a valid key file: it is not a text in UTF-8") from None
    except (ValueError, msgspec.ValidationError) as error:
        raise KeyFault(f"{path} is not a valid key file: {error}") from None
