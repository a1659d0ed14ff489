"""The tools of ``programs.py``. A tool worker serves them to programs, and clients call them."""

from __future__ import annotations

from zlib import crc32


def rated(text: str) -> float:
    """A rating from 0 to 0.999, which depends only on the text."""
    return crc32(text.encode()) % 1000 / 1000


def weather(city: str) -> str:
    """The temperature in a city."""
    return f"{_fact(city)} C"


def height(city: str) -> str:
    """The height of a city above the sea."""
    return f"{_fact(city)} m"


def people(city: str) -> str:
    """The number of people in a city."""
    return f"{_fact(city)}000"


def buses(city: str) -> str:
    """The number of bus lines in a city."""
    return str(_fact(city))


def museums(city: str) -> str:
    """The number of museums in a city."""
    return str(_fact(city))


def rain(city: str) -> str:
    """The rain in a city."""
    return f"{_fact(city)} mm"


def latitude(city: str) -> str:
    """The latitude of a city."""
    return f"{_fact(city)} N"


def _fact(city: str) -> int:
    return crc32(city.encode()) % 90


CITY_TOOLS = (weather, height, people, buses, museums, rain, latitude)
