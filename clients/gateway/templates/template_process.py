"""Renders chat templates, checks values against schemas and rewrites schemas: ``python -m
tokenbus.clients.gateway.templates.template_process``.

A template is a program from the publisher of the model or from a client. It runs in this separate
process, in Jinja's sandbox, with bounded memory and CPU time. Requests arrive on stdin, and the
process writes answers to stdout. Each request and each answer is JSON, and its number of bytes
precedes it. A template has the same environment (filters, globals, extensions, namespace
attributes) as in transformers' ``apply_chat_template``.
"""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import sys
import time
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import IO, Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser

from ....protocol.json_schema import rewritten

CPU_S = 2
"""Maximum CPU time of a request, in seconds. The kernel may allow up to one second more."""
MEMORY_BYTES = 1024**3
"""Maximum address space of the process."""
MAX_BYTES = 16 * 1024 * 1024
"""Maximum bytes of a rendered text."""
MAX_FAULT = 2000
"""Maximum number of characters in an error message. A template can raise any message."""
KEPT = 32
"""Maximum number of cached compiled templates."""
LENGTH = struct.Struct("<I")

_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""A mark at the end of the last message, if the model continues this message. With the mark, the
end of the message is found in the rendered text. If the template strips white space, the final
space is missing in the rendered text."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Field names of a message's reasoning in the templates of different models."""


class TemplateFault(Exception):
    """A template cannot be rendered with these messages. The client receives the error's text."""


class TemplateLimitFault(TemplateFault):
    """A rendering exceeds a bound. After any other TemplateFault, the gateway tries other
    arrangements of the messages. After this error, it does not."""


class _Generation(jinja2.ext.Extension):
    """The tag ``{% generation %}``, which marks an assistant's text for training. The text is
    rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """``dict`` for templates. Templates can use only the constructor and ``fromkeys``."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """``namespace`` for templates, without attributes whose names begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson``. Jinja's own filter would escape HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(KEPT)
def compile_template(text: str) -> jinja2.Template:
    """Compiles a template in the environment that transformers uses; raises TemplateError."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment.from_string(text)


def render(
    template: str,
    messages: list[dict[str, Any]],
    variables: dict[str, Any],
    continue_final_message: bool = False,
) -> str:
    """Renders the text of a conversation.

    ``variables``: the template's variables other than the messages. ``continue_final_message``:
    whether the model continues the last message, so that the text ends with this message's content.
    Raises TemplateFault.
    """
    messages = [_with_reasoning(message) for message in messages]
    if continue_final_message:
        _tag_last(messages)
    try:
        text = compile_template(template).render(messages=messages, **variables)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateFault(f"line {error.lineno} is not valid: {error.message}") from None
    except jinja2.TemplateError as error:
        raise TemplateFault(str(error.message)) from None
    except MemoryError:
        raise TemplateLimitFault(f"it needs more than {MEMORY_BYTES >> 20} MiB of memory") from None
    except RecursionError:
        raise TemplateLimitFault("it recurses too deeply") from None
    except Exception as error:
        raise TemplateFault(f"{type(error).__name__}: {error}") from None
    if continue_final_message:
        text = _cut_at_tag(text)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise TemplateFault(
            "the rendered text has half of a surrogate pair, which is not a character"
        ) from None
    if size > MAX_BYTES:
        raise TemplateLimitFault(
            f"the rendered text has {size} bytes; at most {MAX_BYTES} are allowed"
        )
    return text


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    given = (message[name] for name in _REASONING if message.get(name) is not None)
    reasoning = next(given, None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _tag_last(messages: list[dict[str, Any]]) -> None:
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise TemplateFault("the last message has no text to continue")
    messages[-1] = {**messages[-1], "content": content + _TAG}


def _cut_at_tag(text: str) -> str:
    place = text.rfind(_TAG.strip())
    if place < 0:
        raise TemplateFault("the template leaves out the last message, which should be continued")
    kept = text[:place]
    return kept if text.startswith(_TAG, place) else kept.rstrip()


def answer_of(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request. Most requests render a template: the answer has the text, or the
    reason why the template cannot be rendered. A request with ``keywords`` asks whether a value
    satisfies these keywords of a JSON schema (``schema_check.py``). A request with ``rewrite`` has
    a JSON schema, and its answer has the fields of ``Rewritten``."""
    if "rewrite" in request:
        return rewritten(request["rewrite"])._asdict()
    if "keywords" in request:
        # jsonschema takes 100 ms to import, and few requests need it.
        from .schema_check import states_of

        return states_of(**request)
    try:
        return {"text": render(**request)}
    except TemplateFault as fault:
        kind = "limit" if isinstance(fault, TemplateLimitFault) else "fault"
        return {kind: str(fault).encode(errors="backslashreplace").decode()[:MAX_FAULT]}


def _serve(source: IO[bytes], target: IO[bytes]) -> None:
    while len(head := source.read(LENGTH.size)) == LENGTH.size:
        request = json.loads(source.read(LENGTH.unpack(head)[0]))
        limit = math.ceil(time.process_time() + CPU_S)
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        # In ASCII, the answer would have up to three times the number of bytes.
        answer = json.dumps(answer_of(request), ensure_ascii=False).encode()
        target.write(LENGTH.pack(len(answer)) + answer)
        target.flush()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _serve(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)
