"""The constraint that a request gives in ``response_format``, ``structured_outputs`` or
``controller``."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from ..bodies.reading import Body
from ..conversation.constraints import Constraint, Schema, json_object, json_schema
from ..errors import invalid_field

FormatName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class StructuredOutputs(Body):
    """vLLM's ``structured_outputs``. Exactly one field must be given."""

    json: str | Schema | None = None
    """A JSON schema, as an object or as text."""
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    """A grammar in llguidance's variant of the language of Lark."""
    json_object: bool | None = None

    def constraint(self) -> Constraint:
        """The constraint of the only given field. Raises ApiError 400 unless exactly one field is
        given."""
        given = {
            "json": ("json_schema", self.json),
            "regex": ("regex", self.regex),
            "choice": ("choice", self.choice),
            "grammar": ("lark", self.grammar),
            "json_object": ("json_schema", {"type": "object"} if self.json_object else None),
        }
        asked = [
            Constraint(
                "json_schema" if name == "json" else name, controller, arg, _inside(name), False
            )
            for name, (controller, arg) in given.items()
            if arg is not None
        ]
        if len(asked) != 1:
            names = ", ".join(given)
            raise invalid_field(
                "structured_outputs",
                f"structured_outputs has {len(asked)} constraints; it must have one of {names}",
            )
        return asked[0]


def _inside(name: str) -> str:
    return f"structured_outputs.{name}"


class TextFormat(Body, tag="text", tag_field="type"):
    """``{"type": "text"}``: no constraint."""


class JsonObjectFormat(Body, tag="json_object", tag_field="type"):
    """``{"type": "json_object"}``: any JSON object."""

    schema: Schema | None = None
    """llama.cpp's field for a schema of the object."""

    def constraint(self, name: str) -> Constraint:
        """The constraint that the field ``name`` requests."""
        if self.schema is None:
            return json_object(name)
        return json_schema(self.schema, f"{name}.schema", strict=False)


class JsonSchema(Body):
    """The schema of ``response_format``."""

    name: FormatName
    schema: Schema | None = None
    """The JSON schema of the text. Default: any JSON object."""
    description: str | None = None
    strict: bool | None = None
    """Whether the request is refused if the schema has keywords that masks cannot enforce."""


class JsonSchemaFormat(Body, tag="json_schema", tag_field="type"):
    """``{"type": "json_schema", "json_schema": {…}}``."""

    json_schema: JsonSchema


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


def format_constraint(given: ResponseFormat | None, name: str) -> Constraint | None:
    """The constraint of a ``response_format``. ``name`` is the name of the field."""
    match given:
        case JsonObjectFormat():
            return given.constraint(name)
        case JsonSchemaFormat(json_schema=asked):
            return json_schema(asked.schema, f"{name}.json_schema.schema", asked.strict)
    return None


def only_constraint(
    structured: StructuredOutputs | None,
    controller: str | None,
    controller_arg: str | dict[str, Any] | list[Any] | None,
    format: Constraint | None,
) -> Constraint | None:
    """The constraint of a request, or None; raises ApiError 400 if there are several."""
    asked = [format] if format is not None else []
    if structured is not None:
        asked.append(structured.constraint())
    if controller is not None:
        asked.append(Constraint(controller, controller, controller_arg, "controller_arg"))
    elif controller_arg is not None:
        raise invalid_field(
            "controller_arg",
            "controller_arg is given without a controller; add 'controller'",
        )
    if len(asked) > 1:
        names = " and ".join(one.field.partition(".")[0] for one in asked)
        raise invalid_field(
            asked[-1].field.partition(".")[0],
            f"{names} cannot be combined; a request has one constraint (the constraint "
            "'combination' joins several)",
        )
    return asked[0] if asked else None
