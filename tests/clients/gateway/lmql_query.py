"""A query of LMQL, run in an environment of its own: ``python lmql_query.py ENDPOINT TOKENIZER``.

Prints its result, as JSON.
"""

import asyncio
import json
import sys

import lmql

ENDPOINT, TOKENIZER = sys.argv[1:]
MODEL = lmql.model("embedded", endpoint=ENDPOINT, tokenizer=TOKENIZER)


@lmql.query(model=MODEL)
async def query():
    """lmql
    argmax(max_len=64)
    "def add(a, b):\n    return [VALUE]" where len(TOKENS(VALUE)) < 8
    return VALUE
    """


if __name__ == "__main__":
    print(json.dumps(asyncio.run(query())))
