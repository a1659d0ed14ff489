"""A stream of the simulated model. The stream's request alone determines its tokens."""

from __future__ import annotations

import zlib

from tokenbus.protocol.messages import Generate, Token

VOCABULARY = 1000


def token_at(seed: int, seq: int, pos: int) -> int:
    """The token of a sequence at a position."""
    return zlib.crc32(b"%d:%d:%d" % (seed, seq, pos)) % VOCABULARY


def entry_at(request: Generate, seq: int, pos: int) -> Token:
    """The entry of a sequence at a position. The worker sets ``live`` in the last entry."""
    token = token_at(request.seed or 0, seq, pos)
    return Token(
        token=token,
        stream_id=request.stream_id,
        logprob=-float(token),
        finish_reason="length" if pos == request.max_tokens - 1 else None,
        top_logprobs={token: -float(token)},
        pos=pos,
        seq=seq,
        logs=f"{pos};" if request.controller else "",
    )
