"""``tokenbus keys``: manages the keys of clients and workers of this machine's broker."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ...protocol.decoders import convert
from ...protocol.keys import Allowed, KeyFault, KeyFolder, KeyPair, Quotas, Role
from ...protocol.settings import Settings

Subparsers = Any

QUOTAS = {
    "streams": "number of live streams in all sessions of the client",
    "tokens_per_minute": "number of generated tokens in a minute",
    "max_priority": "highest priority of a request, at most 100",
    "upload_bytes": "bytes of controller modules in the store",
    "variable_bytes": "bytes of variables of all live requests",
    "sandbox_ms_per_minute": "milliseconds of CPU time for controllers in a minute",
}
"""Maps each quota of a client to a description of the quantity that it bounds."""


def add_command(subparsers: Subparsers) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "keys",
        allow_abbrev=False,
        help="make, allow, revoke and list the keys of the bus",
        description="Manages the keys of clients and workers that may connect to the broker of "
        "this machine. A running broker that has keys applies changes without a restart.",
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)

    def add(name: str, help_: str, run: Callable[[argparse.Namespace, Settings], int]) -> Any:
        verb = verbs.add_parser(name, allow_abbrev=False, help=help_)
        verb.add_argument("--keys", metavar="DIR", help="broker's key folder (<run dir>/keys)")
        verb.add_argument("--run-dir", dest="run_dir", metavar="DIR", help="run directory")
        verb.set_defaults(run=run)
        return verb

    new = add("new", "make a key; make the broker's keys first if they do not exist", _new)
    new.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="holder; if missing, only the broker's keys are made",
    )
    new.add_argument("--file", metavar="FILE", help="file for the key (default: ./NAME.key)")
    new.add_argument(
        "--broker",
        metavar="PUBLIC",
        help="public key of a broker on another machine; allow the new key on that machine",
    )
    allow = add("allow", "allow a public key to connect, or change the quotas of a holder", _allow)
    allow.add_argument("name", metavar="NAME", help="holder of the key")
    allow.add_argument(
        "public", nargs="?", metavar="PUBLIC", help="public key: 64 hexadecimal digits"
    )
    for verb in (new, allow):
        verb.add_argument(
            "--worker", action="store_true", help="the key is for a worker, not a client"
        )
        for quota, what in QUOTAS.items():
            verb.add_argument(
                "--" + quota.replace("_", "-"),
                dest=f"q_{quota}",
                type=_bound,
                metavar="N",
                help=f"quota: {what}, or none",
            )
        verb.add_argument(
            "--tools",
            dest="allowed_tools",
            metavar="T,T",
            help="tools that the client's programs may call, with * and ?; 'none' for no tools, "
            "'default' for the tools of the setting allow_tools",
        )
    revoke = add("revoke", "revoke a key, which also ends its live connections", _revoke)
    revoke.add_argument("name", metavar="NAME", help="holder of the key")
    add("list", "list the keys that may connect", _list)


def new_pair() -> KeyPair:
    """A new CURVE key pair."""
    import zmq
    from zmq.utils import z85

    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public).hex(), z85.decode(secret).hex())


def _new(args: argparse.Namespace, settings: Settings) -> int:
    if args.broker is not None:
        return _new_for_another(args)
    folder = KeyFolder(settings.keys_folder)
    made = folder.make(new_pair)
    if made:
        print(f"made the broker's keys in {folder.path}; restart the broker if it is running")
    if args.name is None:
        if not made:
            raise KeyFault(
                f"the broker's keys exist already in {folder.path}; give the NAME of a holder"
            )
        return 0
    role = _role(args)
    if args.name in folder.allowed(role):
        raise KeyFault(f"the {role} {args.name!r} has a key already; revoke it first")
    file = Path(args.file or f"{args.name}.key")
    key = folder.issue(args.name, role, new_pair(), folder.broker().public)
    key.write(file)
    folder.allow(role, args.name, _allowed(args, key.public, Quotas()))
    print(f"{file} is the key of the {role} {args.name!r}, which may connect from now on")
    print(f"give the file to the holder, who sets TOKENBUS_KEY={file}")
    return 0


def _new_for_another(args: argparse.Namespace) -> int:
    """Creates a key on the machine that will use the key, so that the secret key stays there."""
    if args.name is None:
        raise KeyFault("the holder's name is missing; use: tokenbus keys new NAME --broker PUBLIC")
    file = Path(args.file or f"{args.name}.key")
    key = KeyFolder.issue(args.name, _role(args), new_pair(), _public(args.broker))
    key.write(file)
    flag = " --worker" if args.worker else ""
    print(
        f"{file} is the key of the {key.role} {key.name!r}; allow it on the broker's machine with:"
    )
    print(f"  tokenbus keys allow {key.name} {key.public}{flag}")
    return 0


def _allow(args: argparse.Namespace, settings: Settings) -> int:
    folder, role = _existing(settings), _role(args)
    before = folder.allowed(role).get(args.name)
    if args.public is None and before is None:
        raise KeyFault(
            f"the {role} {args.name!r} is unknown; allow its public key with: "
            f"tokenbus keys allow {args.name} PUBLIC"
        )
    public = _public(args.public) if args.public is not None else before and before.public
    assert public
    folder.allow(role, args.name, _allowed(args, public, before or Quotas()))
    print(f"the {role} {args.name!r} may connect")
    return 0


def _revoke(args: argparse.Namespace, settings: Settings) -> int:
    roles = _existing(settings).revoke(args.name)
    print(f"the {' and the '.join(roles)} {args.name!r} may not connect any more")
    return 0


def _list(args: argparse.Namespace, settings: Settings) -> int:
    folder = _existing(settings)
    print(f"broker  {folder.broker().public}  (for 'tokenbus keys new NAME --broker')")
    roles: tuple[Role, ...] = ("client", "worker")
    for role in roles:
        for name, allowed in folder.allowed(role).items():
            quotas = " ".join(
                f"{quota}={value}"
                for quota in QUOTAS
                if (value := getattr(allowed, quota)) is not None
            )
            tools = "" if allowed.tools is None else f" tools={','.join(allowed.tools) or 'none'}"
            print(f"{role}  {allowed.public}  {name}  {quotas}{tools}".rstrip())
    return 0


def _existing(settings: Settings) -> KeyFolder:
    folder = KeyFolder.of(settings)
    if folder is None:
        raise KeyFault(
            f"{settings.keys_folder} has no keys; make the broker's keys with 'tokenbus keys new'"
        )
    return folder


def _role(args: argparse.Namespace) -> Role:
    return "worker" if args.worker else "client"


def _allowed(args: argparse.Namespace, public: str, before: Quotas) -> Allowed:
    given = {name: getattr(args, f"q_{name}") for name in QUOTAS}
    if args.worker and any(value is not None for value in (*given.values(), args.allowed_tools)):
        raise KeyFault(
            "a worker's key has no quotas and no tools; leave out --worker, or leave out the "
            "quotas and --tools"
        )
    kept = {name: getattr(before, name) for name in QUOTAS}
    quotas = kept | {n: v or None for n, v in given.items() if v is not None}
    operator = isinstance(before, Allowed) and before.operator
    tools = before.tools if isinstance(before, Allowed) else None
    if args.allowed_tools is not None:
        listed = [each.strip() for each in args.allowed_tools.split(",") if each.strip()]
        tools = {"none": [], "default": None}.get(args.allowed_tools, listed)
    return Allowed(public=public, operator=operator, tools=tools, **quotas)


def _public(text: str) -> str:
    try:
        convert({"public": text, "secret": text}, KeyPair)
    except msgspec.ValidationError:
        raise KeyFault(
            f"{text!r} is not a public key; expected 64 hexadecimal digits, as printed by "
            "'tokenbus keys list'"
        ) from None
    return text


def _bound(text: str) -> int:
    if text == "none":
        return 0
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not valid; expected a whole number of at least 1, or 'none'"
        )
    return int(text)
