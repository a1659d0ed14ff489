"""Streams of JSON lines."""

from __future__ import annotations

from ..events import EventStream


class LineStream(EventStream):
    """An answer with one JSON value on each line. The lines have no event numbers."""

    media_type = "application/x-ndjson"
    numbers = False
