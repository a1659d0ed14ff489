"""Trace contexts, and when traces are exported."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tokenbus.protocol.tracing import TraceContext, span_id, wanted

from ..processes import clean_environment

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_a_traceparent_is_read_and_written() -> None:
    context = TraceContext.parse(HEADER)
    assert context == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331, True)
    assert str(context) == HEADER
    unsampled = TraceContext.parse(HEADER[:-2] + "00")
    assert unsampled is not None
    assert not unsampled.sampled
    assert TraceContext.parse("01" + HEADER[2:] + "-more") == context


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no traceparent",
        HEADER[:-3],
        HEADER.upper(),
        "ff" + HEADER[2:],
        HEADER.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        HEADER.replace("b7ad6b7169203331", "0" * 16),
    ],
)
def test_an_invalid_traceparent_is_none(text: str) -> None:
    assert TraceContext.parse(text) is None


def test_the_span_of_a_process_has_an_id_that_others_can_compute() -> None:
    context = TraceContext.parse(HEADER)
    assert context is not None
    ids = [span_id(context, request, p) for request in (1, 2) for p in ("broker", "gpu")]
    assert len(set(ids)) == 4
    assert ids[0] == span_id(context, 1, "broker")
    assert all(0 < number < 1 << 64 for number in ids)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://h:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4318/v1/traces"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, False),
        ({"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://h"}, False),
    ],
)
def test_traces_are_exported_where_a_variable_names_an_exporter(
    variables: dict[str, str], expected: bool
) -> None:
    assert wanted(variables) is expected


@pytest.mark.process
def test_nothing_of_opentelemetry_is_imported_without_such_a_variable() -> None:
    code = (
        "import sys, tokenbus.clients, tokenbus.clients.gateway.app, tokenbus.broker.server\n"
        "from tokenbus.protocol import tracing\n"
        "assert tracing.start('broker') is None\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), timeout=300)
    assert done.returncode == 0
