"""Patterns for the formats of JSON Schema that llguidance does not implement. Each string that
matches the pattern of a format has the format, but some strings of the format do not match."""

from __future__ import annotations

KNOWN = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname"}
    | {"ipv4", "ipv6", "uuid", "uri", "unknown"}
)
"""Formats that llguidance implements."""

_CHARACTER = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_SEGMENT = _CHARACTER.replace(";=:@", ";=@")
_SUFFIX = (
    rf"(?:\?(?:{_CHARACTER}|[/?])*)?"  # query
    rf"(?:\x23(?:{_CHARACTER}|[/?])*)?"  # fragment
)
_PATH = rf"(?:/{_CHARACTER}*)*"
_AUTHORITY = r"//(?:[A-Za-z0-9._~-]|%[0-9A-Fa-f]{2})*(?::[0-9]*)?"
_RELATIVE = rf"(?:{_AUTHORITY}{_PATH}|/(?:{_CHARACTER}+{_PATH})?|{_SEGMENT}+{_PATH})?{_SUFFIX}"
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]*:"
_REFERENCE = (
    rf"^(?:(?:{_SCHEME}(?:{_AUTHORITY}{_PATH}|/?{_CHARACTER}+{_PATH})?{_SUFFIX})|{_RELATIVE})$"
)
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = (
    r"(?:[^\\\x5b\x5d(){}*+?|^$.\n]|\.|\\[dDwWsS]|\\[\\\x5b\x5d(){}*+?|^$.\x2f-]"
    r"|\[[A-Za-z0-9_ ]+\]|\((?:[A-Za-z0-9_ ]|\\[dws])+\))"
)

PATTERNS = {
    "uri-reference": _REFERENCE,
    "iri": rf"^{_SCHEME}(?:{_AUTHORITY}{_PATH}|/?{_CHARACTER}+{_PATH}){_SUFFIX}$",
    "iri-reference": _REFERENCE,
    "uri-template": r"^(?:[A-Za-z0-9._~/:?&=@!$+,;-]|\x7b[A-Za-z0-9_]+(?:,[A-Za-z0-9_]+)*\x7d)*$",
    "json-pointer": rf"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9][0-9]*)(?:\x23|{_POINTER})$",
    "idn-hostname": rf"^{_HOST}$",
    "idn-email": rf"^[A-Za-z0-9_+-]+(?:\.[A-Za-z0-9_+-]+)*@{_HOST}$",
    "regex": rf"^\^?(?:{_ATOM}[*+?]?)*\$?$",
}
