"""Runs LMQL's unmodified client, in a separate environment.

``python _lmql_client.py URL MODEL`` reads rounds from standard input. A round is a line of JSON: a
list of (prompt, max_tokens) pairs whose streams begin together. For each round, the process prints
the number of received tokens and the seconds. LMQL's server continues all streams of a batch up to
the largest ``max_tokens`` of the batch. If a stream receives more tokens than its own
``max_tokens``, the additional tokens are not counted.
"""

import asyncio
import json
import sys
import time

import aiohttp
from lmql.models.lmtp.lmtp_client import LMTPWebSocketClient


async def _stream(client: LMTPWebSocketClient, prompt: list[int], max_tokens: int) -> int:
    received = 0
    async for _ in client.generate(prompt, max_tokens=max_tokens, temperature=0.0):
        received += 1
    return min(received, max_tokens)


async def main(url: str, model: str) -> None:
    """Runs rounds until the end of the input."""
    async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as ws:
        client = LMTPWebSocketClient(model, ws)
        client.connect()
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            requests = json.loads(line)
            began = time.perf_counter()
            counts = await asyncio.gather(*(_stream(client, *request) for request in requests))
            seconds = time.perf_counter() - began
            print(json.dumps({"tokens": sum(counts), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
