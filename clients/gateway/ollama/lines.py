"""Streams of JSON lines."""

from __future__ import annotations

from ..events import EventStream


class LineStream(EventStream):
    """An answer with one JSON value on each line. Its lines have no numbers."""

    media_type = "application/x-ndjson"
    numbers = False
