"""LMQL's own client, unmodified, run in an environment of its own.

``python _lmql_client.py URL MODEL`` reads rounds from standard input, a line of JSON each: a list
of (prompt, max_tokens), begun at once. For each it prints how many of the tokens that were asked
for arrived, and in how many seconds. LMQL's server goes on to the longest ``max_tokens`` of a batch
in all of its streams: what a stream has beyond its own does not count.
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
    """Until the end of the input."""
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
