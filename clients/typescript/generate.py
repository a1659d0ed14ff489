"""Writes ``src/messages.ts`` with the messages and error codes of ``protocol/`` in TypeScript.

    python -m tokenbus.clients.typescript.generate

The structs of ``protocol/messages.py`` are the only definition of the messages; a test fails if the
committed file differs from the output of this script.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import NODEFAULT
from msgspec.inspect import (
    AnyType,
    BoolType,
    BytesType,
    DictType,
    Field,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    NoneType,
    StrType,
    StructType,
    Type,
    UnionType,
    VarTupleType,
    type_info,
)

from ...protocol import messages
from ...protocol.errors import RETRYABLE, Code, error_for

OUTPUT = Path(__file__).parent / "src" / "messages.ts"
WIDTH = 100
CONSTANTS = ("PROTOCOL_VERSION", "MAX_MODULE_BYTES")
OPTIONS = (messages.Generate, messages.Score)
"""Messages whose fields are options of the client. The client checks the names of its options."""
NAMES = {"Buffer": "BufferMessage", "Error": "ErrorMessage"}
"""The TypeScript names of structs whose own names already exist in JavaScript."""

HEAD = """\
// `python -m tokenbus.clients.typescript.generate` writes this file from protocol/messages.py and
// protocol/errors.py. Change these files and run the command again.

/** Any value that JSON can express. */
export type Json =
  | null
  | boolean
  | number
  | string
  | readonly Json[]
  | { readonly [name: string]: Json };

/** `T` as it is sent. The fields `D` have defaults and may be absent. */
type Sent<T, D extends keyof T> = Omit<T, D> & Partial<T>;

/** `T` with writable fields. */
type Made<T> = { -readonly [F in keyof T]: T[F] };
"""


def typescript() -> str:
    """The text of ``src/messages.ts``."""
    client = [type_info(kind) for kind in messages.CLIENT_MESSAGES.values()]
    server = [type_info(kind) for kind in messages.SERVER_MESSAGES.values()]
    answers = [type_info(messages.StoredModule)]
    parts = [HEAD, *_constants(), *_codes()]
    parts += [_interface(struct, sent=True) for struct in _structs(client)]
    parts += [_field_names(struct) for struct in _structs(client) if struct.cls in OPTIONS]
    for struct in _structs([*server, *answers]):
        parts += [_interface(struct, sent=False), _reader(struct)]
    parts.append(_table("The body of each message type of a client.", "ClientMessages", client))
    parts.append(_table("The body of each message type of the broker.", "ServerMessages", server))
    parts.append(_dispatch())
    return "\n".join(parts)


def main() -> None:
    """Writes the file."""
    OUTPUT.write_text(typescript())


# --- constants and codes --------------------------------------------------------------------------


def _constants() -> Iterator[str]:
    for name in CONSTANTS:
        yield f"export const {name} = {getattr(messages, name)};\n"


def _codes() -> Iterator[str]:
    kinds = {code.value: type(error_for(code, "")).__name__ for code in Code}
    yield (
        _comment("The reason why Tokenbus refuses or ends a request.")
        + f"export type Code ={_alternatives(list(kinds))};\n"
    )
    yield (
        _comment("The class of an error.")
        + f"export type ErrorKind ={_alternatives(sorted(set(kinds.values())))};\n"
    )
    rows = "".join(f"  {code}: {json.dumps(kind)},\n" for code, kind in kinds.items())
    yield (
        _comment("The class of the error with this code.")
        + f"export const ERROR_KINDS: Readonly<Record<Code, ErrorKind>> = {{\n{rows}}};\n"
    )
    rows = "".join(f"  {json.dumps(code)},\n" for code in sorted(RETRYABLE))
    yield (
        _comment("Codes after which the same request may succeed if it is sent again.")
        + f"export const RETRYABLE: ReadonlySet<string> = new Set<Code>([\n{rows}]);\n"
    )


def _alternatives(values: list[str]) -> str:
    return "".join(f"\n  | {json.dumps(value)}" for value in values)


# --- structs --------------------------------------------------------------------------------------


def _structs(kinds: list[Type]) -> list[StructType]:
    """The structs in ``kinds``. Each struct follows the structs in its fields, and occurs once."""
    found: dict[str, StructType] = {}

    def visit(kind: Type) -> None:
        match kind:
            case StructType():
                for field in kind.fields:
                    visit(field.type)
                found.setdefault(kind.cls.__name__, kind)
            case ListType() | VarTupleType():
                visit(kind.item_type)
            case DictType():
                visit(kind.value_type)
            case UnionType():
                for one in kind.types:
                    visit(one)

    for kind in kinds:
        visit(kind)
    return list(found.values())


def _interface(struct: StructType, *, sent: bool) -> str:
    """The interface of a sent message, or of a received message with its defaults."""
    docs = _field_docs(struct.cls)
    lines = []
    for field in struct.fields:
        text = docs.get(field.name, "")
        if sent:
            text = " ".join(filter(None, (text, _bounds(field.type), _default_text(field))))
        lines.append(_comment(text, "  "))
        optional = not field.required and (sent or not _has_default(field))
        name = f"{field.encode_name}?" if optional else field.encode_name
        # An application may set a field to undefined, which is then not sent.
        undefined = " | undefined" if optional and sent else ""
        lines.append(f"  readonly {name}: {_type(field.type)}{undefined};\n")
    doc = _comment(inspect.getdoc(struct.cls) or "")
    body = f"{{\n{''.join(lines)}}}" if lines else "{}"
    return f"{doc}export interface {_name(struct)} {body}\n"


def _field_names(struct: StructType) -> str:
    """The list of the names of a struct's fields."""
    name = _name(struct)
    rows = "".join(f"  {json.dumps(field.encode_name)},\n" for field in struct.fields)
    return (
        f"/** The fields of `{name}`. */\n"
        f"export const {name.upper()}_FIELDS: readonly (keyof {name})[] = [\n{rows}];\n"
    )


def _reader(struct: StructType) -> str:
    """The function that adds the defaults of a struct.

    The function returns an object literal with all fields. Spreading the defaults and the received
    object would take fifteen times as long as parsing the JSON of a token.
    """
    name = _name(struct)
    defaults = [f.encode_name for f in struct.fields if not f.required and _has_default(f)]
    fields, optional = [], []
    for field in struct.fields:
        key, value = field.encode_name, f"sent.{field.encode_name}"
        reading = _reading(field.type)
        read = value if reading is None else reading.format(value)
        if field.required:
            fields.append(f"    {key}: {read},\n")
        elif not _has_default(field):
            optional.append(f"  if ({value} !== undefined) read.{key} = {read};\n")
        elif reading is None:
            fields.append(f"    {key}: {value} ?? {json.dumps(_default(field))},\n")
        else:
            default = json.dumps(_default(field))
            absent = reading.format("{}") if isinstance(field.type, StructType) else default
            fields.append(f"    {key}: {value} == null ? {absent} : {read},\n")
    absent = " | ".join(map(json.dumps, defaults)) or "never"
    head = f"export function read{name}(sent: Sent<{name}, {absent}>): {name} {{"
    if len(head) > WIDTH:
        absent = _alternatives(defaults).replace("\n", "\n    ")
        head = (
            f"export function read{name}(\n  sent: Sent<\n    {name},{absent}\n  >,\n): {name} {{"
        )
    made = f"{{\n{''.join(fields)}  }}"
    if optional:
        body = f"  const read: Made<{name}> = {made};\n{''.join(optional)}  return read;\n"
    else:
        body = f"  return {made};\n"
    return f"/** Adds the defaults of absent fields to a received `{name}`. */\n{head}\n{body}}}\n"


def _reading(kind: Type) -> str | None:
    """A TypeScript expression that converts a received value of this type. ``{}`` in the expression
    stands for the value. None if the value is used unchanged."""
    match kind:
        case StructType():
            return f"read{_name(kind)}({{}})"
        case ListType() if isinstance(kind.item_type, StructType):
            return f"{{}}.map(read{_name(kind.item_type)})"
        case UnionType():
            return next((r for one in kind.types if (r := _reading(one)) is not None), None)
    return None


def _table(doc: str, name: str, kinds: list[Type]) -> str:
    words = messages.CLIENT_MESSAGES if name == "ClientMessages" else messages.SERVER_MESSAGES
    rows = "".join(
        f"  readonly {message_type.decode()}: {_type(kind)};\n"
        for message_type, kind in zip(words, kinds, strict=True)
    )
    return f"{_comment(doc)}export interface {name} {{\n{rows}}}\n"


def _dispatch() -> str:
    rows = []
    for message_type, kind in messages.SERVER_MESSAGES.items():
        info = type_info(kind)
        reading = _reading(info)
        assert reading is not None
        struct = _name(_structs([info])[-1])
        many = "[]" if isinstance(info, ListType) else ""
        sent = f"(body as Parameters<typeof read{struct}>[0]{many})"
        read = reading.format(sent) if many else f"read{struct}{sent}"
        rows.append(
            f'    case "{message_type.decode()}":\n      return {{ type, body: {read} }};\n'
        )
    return (
        "/** A message to a client. */\n"
        "export type ServerMessage = {\n"
        "  [T in keyof ServerMessages]: { readonly type: T; readonly body: ServerMessages[T] };\n"
        "}[keyof ServerMessages];\n\n"
        "/** The message with this type and decoded body; null if the type is unknown. */\n"
        "export function readMessage(type: string, body: unknown): ServerMessage | null {\n"
        f"  switch (type) {{\n{''.join(rows)}"
        "    default:\n      return null;\n  }\n}\n"
    )


# --- names, types, defaults, docs -----------------------------------------------------------------


def _name(struct: StructType) -> str:
    name = struct.cls.__name__
    return NAMES.get(name, name)


def _type(kind: Type) -> str:
    """The TypeScript type of the JSON values that represent a Python type."""
    match kind:
        case IntType() | FloatType():
            return "number"
        case StrType() | BytesType():
            return "string"
        case BoolType():
            return "boolean"
        case NoneType():
            return "null"
        case AnyType():
            return "Json"
        case LiteralType():
            return " | ".join(json.dumps(value) for value in kind.values)
        case ListType() | VarTupleType():
            item = _type(kind.item_type)
            return f"readonly ({item})[]" if " " in item else f"readonly {item}[]"
        case DictType():
            return f"Readonly<Record<string, {_type(kind.value_type)}>>"
        case StructType():
            return _name(kind)
        case UnionType():
            return " | ".join(dict.fromkeys(map(_type, kind.types)))
    raise TypeError(f"the TypeScript type of {kind} is unknown; add it to _type")


def _has_default(field: Field) -> bool:
    """Whether an absent field gets a default when a message is read. If not, the field remains
    absent."""
    return field.default is not NODEFAULT or field.default_factory is not NODEFAULT


def _default(field: Field) -> Any:
    value = field.default if field.default is not NODEFAULT else field.default_factory()
    return msgspec.to_builtins(value)


def _default_text(field: Field) -> str:
    """A sentence that gives the default of an optional field; empty if the default is obvious."""
    if not _has_default(field):
        return ""
    value = _default(field)
    if value in (None, "", [], {}):
        return ""
    return f"Default: {_number(value) if isinstance(value, float) else json.dumps(value)}."


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _bounds(kind: Type) -> str:
    """A sentence about the bounds of a number or a length, or about the encoding of bytes. Empty if
    the type has no bounds and is not bytes."""
    match kind:
        case IntType() | FloatType():
            bounds = (
                ("at least", kind.ge),
                ("more than", kind.gt),
                ("at most", kind.le),
                ("less than", kind.lt),
            )
            unit = ""
        case StrType() | ListType():
            bounds = (
                ("at least", kind.min_length),
                ("more than", None),
                ("at most", kind.max_length),
                ("less than", None),
            )
            unit = " in length"
        case BytesType():
            return "Base64."
        case UnionType():
            return next(filter(None, map(_bounds, kind.types)), "")
        case _:
            return ""
    parts = [f"{words} {_number(bound)}" for words, bound in bounds if bound is not None]
    return f"{', '.join(parts).capitalize()}{unit}." if parts else ""


def _field_docs(cls: type) -> dict[str, str]:
    """The docstrings of a struct's fields, which follow the fields in the source."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.split(".")[0] != "tokenbus":
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        for node, after in zip(tree.body, tree.body[1:], strict=False):
            if (
                isinstance(node, ast.AnnAssign)
                and isinstance(node.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                docs[node.target.id] = inspect.cleandoc(str(after.value.value))
    return docs


def _comment(text: str, indent: str = "") -> str:
    """A JSDoc comment; empty for an empty text."""
    plain = re.sub(r"\bNone\b", "null", text.replace("``", "`"))
    if not plain:
        return ""
    short = " ".join(plain.split())
    if "\n\n" not in plain and len(indent) + len(short) + 7 <= WIDTH:
        return f"{indent}/** {short} */\n"
    lines: list[str] = []
    for paragraph in plain.split("\n\n"):
        lines += [""] if lines else []
        for item in re.split(r"\n(?=- )", paragraph):
            hang = "  " if item.startswith("- ") else ""
            text = " ".join(item.split())
            lines += textwrap.wrap(text, WIDTH - len(indent) - 3, subsequent_indent=hang)
    body = "".join(f"{indent} *{f' {line}' if line else ''}\n" for line in lines)
    return f"{indent}/**\n{body}{indent} */\n"


if __name__ == "__main__":
    main()
