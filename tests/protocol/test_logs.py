"""Log lines for people and for programs, with the id of the request that a line concerns."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest
from tokenbus.protocol import logs

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def request_id() -> Iterator[None]:
    logs.begin(7, "my-id", TRACE)
    yield
    logs.end(7)


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("tokenbus.test")
    return logger.makeRecord(
        logger.name, logging.WARNING, __file__, 1, message, args, None, extra=extra
    )


def as_json(line: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = json.loads(logs.JsonFormatter("broker").format(line))
    return fields


@pytest.mark.usefixtures("request_id")
def test_a_json_line_has_the_ids_of_its_request() -> None:
    line = as_json(record("request %d failed", 7, **logs.about(7)))
    assert line["message"] == "request 7 failed"
    assert (line["level"], line["process"], line["logger"]) == (
        "warning",
        "broker",
        "tokenbus.test",
    )
    assert (line["request"], line["request_id"]) == (7, "my-id")
    assert line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.usefixtures("request_id")
def test_a_line_for_people_ends_with_the_id() -> None:
    line = logs.HumanFormatter().format(record("request %d failed", 7, **logs.about(7)))
    assert line.endswith("WARNING request 7 failed [my-id]")


def test_control_characters_in_a_line_for_people_are_escaped() -> None:
    path = "/a\r\n2026-11-22 INFO forged\x1b[2J\x9b1m\u2028é"
    line = logs.HumanFormatter().format(record("GET %s", path))
    assert line.endswith(r"GET /a\r\n2026-11-22 INFO forged\x1b[2J\x9b1m\u2028é")


def test_a_request_with_a_trace_only_is_named_by_it() -> None:
    logs.begin(8, "", TRACE)
    line = as_json(record("it began", **logs.about(8)))
    logs.end(8)
    assert line["request_id"] == line["trace_id"] == "0af7651916cd43dd8448eb211c80319c"


def test_after_the_end_of_a_request_its_id_is_forgotten() -> None:
    logs.begin(9, "gone", "")
    logs.end(9)
    assert "request_id" not in as_json(record("it ended", **logs.about(9)))


def test_text_that_is_not_unicode_is_escaped_and_an_exception_is_one_field() -> None:
    try:
        raise ValueError("wrong\udcff")
    except ValueError:
        failed = record("a file \udcff")
        failed.exc_info = sys.exc_info()
    line = as_json(failed)
    assert line["message"] == "a file \\udcff"
    assert "ValueError" in str(line["exception"])
