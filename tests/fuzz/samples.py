"""Valid values of message structs, for the first corpora of fuzzing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import msgspec
from tokenbus.protocol.bodies import Encoding, encode_body

_TEXTS = ("", "a", "é\U0001f600", "embedded", "regex", "cancelled", "x" * 40)
_INTS = (0, 1, 2, 7, 255, 2**31, 2**32 - 1, 2**53, 2**63 - 1)
_FLOATS = (0.0, 0.5, 1.0, -1.5, 1e-300, 86_400.0)


def samples(table: Mapping[bytes, Any], encoding: Encoding, each: int = 3) -> Iterator[list[bytes]]:
    """The types and bodies of ``each`` messages of every type in ``table``. Each run has the same
    messages."""
    for message_type, kind in table.items():
        draw = Random(message_type)
        for _ in range(each):
            yield [message_type, encode_body(sample(kind, draw), encoding)]


def sample(kind: Any, draw: Random) -> Any:
    """A value of a type, within its constraints."""
    return _of(msgspec.inspect.type_info(kind), draw)


def _of(info: Any, draw: Random) -> Any:
    t = msgspec.inspect
    match info:
        case t.IntType():
            low = 0 if info.ge is None else info.ge
            high = 2**63 - 1 if info.le is None else info.le
            return min(max(draw.choice(_INTS), low), high)
        case t.FloatType():
            least = -1e300 if info.ge is None else info.ge
            if info.gt is not None:
                least = info.gt + 1e-3
            return min(max(draw.choice(_FLOATS), least), 1e300 if info.le is None else info.le)
        case t.StrType():
            text = draw.choice(_TEXTS)[: info.max_length]
            return text.ljust(info.min_length or 0, "n")
        case t.BoolType():
            return draw.random() < 0.5
        case t.NoneType():
            return None
        case t.BytesType():
            return draw.randbytes(draw.choice((0, 4, 8)))
        case t.LiteralType():
            return draw.choice(info.values)
        case t.ListType():
            return [_of(info.item_type, draw) for _ in range(draw.randrange(3))]
        case t.VarTupleType():
            return tuple(_of(info.item_type, draw) for _ in range(draw.randrange(3)))
        case t.DictType():
            pairs = range(draw.randrange(3))
            return {_of(info.key_type, draw): _of(info.value_type, draw) for _ in pairs}
        case t.UnionType():
            kinds = [k for k in info.types if getattr(k, "cls", None) is not msgspec.UnsetType]
            return _of(draw.choice(kinds), draw)
        case t.EnumType():
            return draw.choice(list(info.cls))
        case t.StructType():
            given = {f.name: _of(f.type, draw) for f in info.fields if f.required}
            optional = [f for f in info.fields if not f.required]
            chosen = draw.sample(optional, min(len(optional), draw.randrange(5)))
            return info.cls(**given, **{f.name: _of(f.type, draw) for f in chosen})
        case _:
            return draw.choice((None, 1, "text", [1, {"a": 2}]))
