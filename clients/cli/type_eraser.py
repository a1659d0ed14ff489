"""Erases the types of a script in TypeScript, so that the rest is JavaScript.

Spaces replace the types, and line breaks stay. So the rest of the script keeps its lines and
columns, and the positions in errors are right without a source map. Source: Bloomberg's
ts-blank-space. The parser is tree-sitter's grammar of TypeScript.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tree_sitter import Node

SUFFIXES = (".ts", ".mts")
"""The suffixes of files in TypeScript."""

_TYPES = frozenset(
    {
        "type_annotation",
        "asserts_annotation",
        "type_predicate_annotation",
        "type_parameters",
        "type_arguments",
        "implements_clause",
        "accessibility_modifier",
        "override_modifier",
    }
)
"""Node types of the syntax tree. Nodes of these types are erased from the construct that contains
them."""
_DECLARATIONS = frozenset(
    {
        "ambient_declaration",
        "interface_declaration",
        "type_alias_declaration",
        "function_signature",
        "method_signature",
        "abstract_method_signature",
        "index_signature",
    }
)
"""Node types of the syntax tree. Nodes of these types are erased as whole statements or as whole
members of a class."""
_TOKENS = {
    "optional_parameter": ("?",),
    "method_definition": ("?",),
    "public_field_definition": ("readonly", "?", "!"),
    "abstract_class_declaration": ("abstract",),
    "non_null_expression": ("!",),
}
"""Maps the node type of a JavaScript construct to the tokens that TypeScript adds to the
construct."""
_STATEMENTS = frozenset(
    {
        "expression_statement",
        "lexical_declaration",
        "variable_declaration",
        "return_statement",
        "throw_statement",
        "public_field_definition",
    }
)
"""Types of the nodes (statements and class members) that may end at a line break without a
semicolon."""
_NOT_ERASABLE = {
    "enum_declaration": "an enum; expected a const object",
    "internal_module": "a namespace with values; expected a const object",
    "module": "a namespace with values; expected a const object",
    "import_alias": "an import alias; expected const",
    "import_require_clause": "import … = require(…); expected import … from",
}
"""Constructs that JavaScript does not have and that have an effect at run time. The values are the
texts of the errors."""
_BREAKS = b"\r\n"


class TypeScriptFault(ValueError):
    """A script in TypeScript is not valid, or cannot be run without its types. The message begins
    with the number of the line."""


def erase_types(text: bytes) -> bytes:
    """Converts a script in TypeScript to JavaScript.

    Raises TypeScriptFault if the script is not valid or cannot be run without its types, and
    ModuleNotFoundError if the parser is not installed.
    """
    import tree_sitter_typescript
    from tree_sitter import Language, Parser

    parser = Parser(Language(tree_sitter_typescript.language_typescript()))
    root = parser.parse(text).root_node
    if root.has_error:
        raise _syntax_error(root, text)
    eraser = _Eraser(text)
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if not eraser.erases(node):
            nodes += node.children
    return bytes(eraser.made)


class _Eraser:
    """A script in TypeScript whose types are replaced with spaces, node by node."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self.made = bytearray(text)

    def erases(self, node: Node) -> bool:
        """Erases the types at a node; returns whether the whole node is erased. Raises
        TypeScriptFault if the node cannot be run without its types."""
        kind = node.type
        if kind in _NOT_ERASABLE:
            raise _fault(node, _NOT_ERASABLE[kind])
        if _is_type_only(node):
            self._blank(node.start_byte, node.end_byte)
            self.made[node.start_byte] = ord(";")
            return True
        if kind in _TYPES:
            self._erase_part(node)
            return True
        for child in node.children:
            if child.type in _TOKENS.get(kind, ()):
                self._erase_part(child)
        match kind:
            case "as_expression" | "satisfies_expression":
                self._erase_after_value(node)
            case "import_specifier" | "export_specifier" if node.children[0].type == "type":
                self._erase_of_list(node)
                return True
            case "required_parameter" | "optional_parameter":
                return self._erase_parameter(node)
            case "type_assertion":
                self._check_assertion(node)
            case "export_statement" if any(child.type == "=" for child in node.children):
                raise _fault(node, "export =; expected export")
        return False

    # --- single constructs ----------------------------------------------------------------------

    def _blank(self, start: int, end: int) -> None:
        for at in range(start, end):
            if self._text[at] not in _BREAKS:
                self.made[at] = ord(" ")

    def _erase_part(self, node: Node) -> None:
        """Erases a part of a construct. If the part ends a statement at a line break, or begins a
        member of a class, a semicolon replaces the part. Without the semicolon, JavaScript might
        read two lines as one statement."""
        parent = node.parent
        assert parent is not None
        self._blank(node.start_byte, node.end_byte)
        member = parent.parent is not None and parent.parent.type == "class_body"
        modifier = node.type in ("accessibility_modifier", "override_modifier", "readonly")
        begins = member and modifier and parent.start_byte == node.start_byte
        if begins or (node.type != "!" and _ends_statement(node)):
            self.made[node.start_byte] = ord(";")
        if parent.type == "arrow_function" and node == parent.child_by_field_name("return_type"):
            self._keep_arrow_on_line(parent, node)

    def _erase_after_value(self, node: Node) -> None:
        """Erases ``as T`` or ``satisfies T``."""
        keyword, parent = node.children[1], node.parent
        erased = self._text[keyword.start_byte : node.end_byte]
        if b"[" in (line.strip()[:1] for line in erased.splitlines()[1:]):
            what = "a type with a line that begins with '['; expected a semicolon before '[', or "
            raise _fault(node, f"{what}the type on one line")
        self._blank(keyword.start_byte, node.end_byte)
        # If the next line begins with a parenthesis, tree-sitter parses a call, but TypeScript
        # parses a new statement.
        calls = parent is not None and parent.type == "call_expression"
        if _ends_statement(node) or (calls and parent is not None and parent.children[0] == node):
            self.made[keyword.start_byte] = ord(";")

    def _erase_of_list(self, node: Node) -> None:
        """Erases an item of a list, with the comma after the item."""
        after = node.next_sibling
        comma = after is not None and after.type == ","
        end = after.end_byte if comma and after is not None else node.end_byte
        self._blank(node.start_byte, end)

    def _erase_parameter(self, node: Node) -> bool:
        first = node.children[0]
        if first.type in ("accessibility_modifier", "override_modifier", "readonly"):
            raise _fault(first, "a parameter property; expected an assignment to a field")
        if first.type == "this":
            self._erase_of_list(node)
        return first.type == "this"

    def _keep_arrow_on_line(self, node: Node, result: Node) -> None:
        """If a line break is between the parameters and the end of the result's type, moves the
        closing parenthesis of the parameters to this end. JavaScript does not allow a line break
        between the parenthesis and the arrow."""
        parameters = node.child_by_field_name("parameters")
        if parameters is not None and b"\n" in self._text[parameters.end_byte : result.end_byte]:
            self.made[parameters.end_byte - 1] = ord(" ")
            self.made[result.end_byte - 1] = ord(")")

    def _check_assertion(self, node: Node) -> None:
        kind, value = node.children[0], node.children[-1]
        if b"\n" in self._text[kind.start_byte : value.start_byte]:
            raise _fault(node, "<T>value on several lines; expected value as T")


def _is_type_only(node: Node) -> bool:
    """Whether a statement or a member of a class has no effect when the script runs."""
    if node.type in _DECLARATIONS:
        return True
    children = node.children
    match node.type:
        case "import_statement":
            return len(children) > 1 and children[1].type == "type"
        case "export_statement":
            if len(children) > 1 and children[1].type == "type":
                return True
            return any(child.type in _DECLARATIONS for child in children)
        case "public_field_definition":
            return any(child.type in ("declare", "abstract") for child in children)
    return False


def _ends_statement(node: Node) -> bool:
    """Whether a statement without a semicolon ends at the end of a node."""
    parent = node.parent
    while parent is not None and parent.end_byte == node.end_byte:
        if parent.type in _STATEMENTS:
            return True
        parent = parent.parent
    return False


def _syntax_error(root: Node, text: bytes) -> TypeScriptFault:
    """The first syntax error of a text."""
    node = root
    while True:
        inner = next(
            (child for child in node.children if child.has_error or child.is_missing), None
        )
        if node.is_error or node.is_missing or inner is None:
            break
        node = inner
    if node.is_missing:
        return _fault(node, f"a missing {node.type}", "SyntaxError")
    line = text[node.start_byte :].split(b"\n", 1)[0].decode("utf-8", "replace").strip()
    return _fault(node, f"at {line[:60]!r}", "SyntaxError")


def _fault(node: Node, what: str, kind: str = "types cannot be erased from") -> TypeScriptFault:
    separator = ": " if kind == "SyntaxError" else " "
    return TypeScriptFault(f"line {node.start_point[0] + 1}: {kind}{separator}{what}")
