"""Sends requests to a gateway with LMQL's own client: ``python lmql_calls.py URL``.

The program runs in LMQL's environment, and prints the answers as one JSON object.
"""

import asyncio
import json
import sys
import warnings
from typing import Any

import aiohttp
from lmql.models.lmtp.errors import LMTPStreamError
from lmql.models.lmtp.lmtp_client import LMTPWebSocketClient

PROMPTS = [[263, 305 + number] for number in range(10)]
SCORED = [[7, number] for number in range(10)]


async def _all(entries: Any) -> list[Any]:
    return [entry async for entry in entries]


async def _error(entries: Any) -> str:
    try:
        await _all(entries)
    except LMTPStreamError as error:
        return str(error)
    return ""


async def main(url: str) -> None:
    """Sends ten generations and ten scores at once, then three requests that fail."""
    async with aiohttp.ClientSession() as session, session.ws_connect(url) as socket:
        client = LMTPWebSocketClient("embedded", socket)
        client.connect()
        info = await client.request("MODEL_INFO", {"model": "embedded"})
        generated = [
            _all(client.generate(prompt, max_tokens=6, temperature=0.0, top_logprobs=2))
            for prompt in PROMPTS
        ]
        scored = [
            _all(client.score(prompt, ids)) for prompt, ids in zip(PROMPTS, SCORED, strict=True)
        ]
        entries = await asyncio.gather(*generated, *scored)
        invalid = await _error(client.generate([1], max_tokens=0))
        client.model_identifier = "unknown"
        unknown = await _error(client.score([1], [2]))
        refused = await client.request("MODEL_INFO", {})
    print(
        json.dumps(
            {
                "info": info,
                "generated": entries[:10],
                "scored": entries[10:],
                "invalid": invalid,
                "unknown": unknown,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    # LMQL's client warns about messages that it does not understand. Here, a warning is an error.
    warnings.simplefilter("error")
    asyncio.run(main(sys.argv[1]))
