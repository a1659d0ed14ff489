"""The token trie: a prefix tree of the bytes of all tokens. Controllers walk it to compute masks.
Its binary format is that of AICI's guests.

Source: AICI's ``toktree`` (crate ``aici_abi``). The format is little-endian u32 words:

    header   magic, 28 (bytes of the header), bytes of the nodes, of the offsets and of the data,
             number of tokens, end-of-sequence token
    node     token << 8 | byte, subtree size << 8 | number of subtrees that end here; in preorder
    offset   place in the data << 8 | length, one for each token
    data     the bytes of all tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ....protocol.errors import Code, ControllerError

MAGIC = 0x558B6FD3
HEADER_WORDS = 7
NO_TOKEN = 0xFFFFFF
"""Marks a node at which no token ends. Ids, sizes and offsets have 24 bits, so they must be below
this number."""
ROOT_BYTE = 0xFF
LONGEST = 254
"""Maximum bytes of a token in a trie."""

Words = np.ndarray[Any, np.dtype[np.uint32]]


def encode_trie(tokens: Sequence[bytes], eos: int) -> bytes:
    """Encodes the trie of a vocabulary. ``tokens[i]`` are the bytes of token i; ``eos`` is the
    end-of-sequence token, or -1 if the model has none.

    Tokens without bytes (special tokens) and tokens with more than ``LONGEST`` bytes have no node,
    and their length in the offsets is 0. Every other token has one node.

    Several tokens may have the same bytes, such as SentencePiece's ``A`` and ``<0x41>``. As in
    AICI, a search finds the node of the highest id, because a tokenizer produces this id. Longer
    tokens are descendants of this node. The other tokens with these bytes follow this node's
    subtree as leaves with the same parent and byte, in the order of their ids. So a walk over all
    nodes visits each token, and can write an exact mask.

    Encoding 131,072 tokens takes 0.3 to 0.5 s. Raises ControllerError if the number of tokens, or
    of their bytes, does not fit in 24 bits.
    """
    kept = [token if len(token) <= LONGEST else b"" for token in tokens]
    data = b"".join(kept)
    # Apart from the root, the number of nodes is at most the number of bytes.
    for what, count in {"tokens": len(kept), "bytes of tokens": len(data)}.items():
        if count >= NO_TOKEN:
            raise ControllerError(
                Code.CONTROLLER_FAILED,
                f"the token trie would have {count} {what}; its format allows {NO_TOKEN - 1}",
            )
    nodes = _nodes(*_preorder(kept))
    lengths = np.fromiter(map(len, kept), np.int64, len(kept))
    places = np.where(lengths > 0, np.cumsum(lengths) - lengths, 0)
    offsets = (places << 8 | lengths).astype("<u4")
    header = np.array(
        [
            MAGIC,
            4 * HEADER_WORDS,
            4 * len(nodes),
            4 * len(offsets),
            len(data),
            len(kept),
            eos & 0xFFFF_FFFF,
        ],
        "<u4",
    )
    return header.tobytes() + nodes.tobytes() + offsets.tobytes() + data


class _Preorder(NamedTuple):
    """The nodes below the root, in preorder."""

    byte: np.ndarray[Any, np.dtype[np.uint8]]
    depth: np.ndarray[Any, np.dtype[np.int64]]
    """The depth of each node, from 1."""
    token: np.ndarray[Any, np.dtype[np.int64]]


def _preorder(tokens: Sequence[bytes]) -> _Preorder:
    """Computes the nodes in preorder from the sorted tokens. Each token adds one node for each byte
    after the prefix that it shares with the previous token."""
    last = {token: number for number, token in enumerate(tokens)}
    # A token is a duplicate if a token with a higher id has the same bytes. A duplicate gets the
    # suffix U+0100, which sorts after every byte. So the duplicate follows all tokens that begin
    # with the same bytes.
    order = sorted(
        (token.decode("latin-1") + ("" if last[token] == number else "\u0100"), number)
        for number, token in enumerate(tokens)
        if token
    )
    numbers = np.fromiter((number for _, number in order), np.int64, len(order))
    texts = [tokens[number] for number in numbers]
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    twice = np.fromiter((key[-1] == "\u0100" for key, _ in order), np.bool_, len(order))
    shared = np.zeros(len(texts), np.int64)
    if len(texts) > 1:
        width = int(lengths.max())
        table = np.array(texts, f"S{width}").view(np.uint8).reshape(len(texts), width)
        differ = table[1:] != table[:-1]
        first = np.where(differ.any(axis=1), differ.argmax(axis=1), width)
        # The table pads tokens with zeros. A token may also contain zeros, so the length of the
        # shared prefix is bounded by the lengths of both tokens.
        shared[1:] = np.minimum(first, np.minimum(lengths[1:], lengths[:-1]))
    shared = np.minimum(shared, lengths - twice)
    new = lengths - shared
    ends = np.cumsum(new)
    total = int(ends[-1]) if len(ends) else 0
    byte = b"".join(text[at:] for text, at in zip(texts, shared.tolist(), strict=True))
    depth = np.arange(1, total + 1) - np.repeat(ends - new - shared, new)
    token = np.full(total, NO_TOKEN)
    token[ends - 1] = numbers
    return _Preorder(np.frombuffer(byte, np.uint8), depth, token)


def _nodes(
    byte: np.ndarray[Any, np.dtype[np.uint8]],
    depth: np.ndarray[Any, np.dtype[np.int64]],
    token: np.ndarray[Any, np.dtype[np.int64]],
) -> Words:
    """The two words of each node, beginning with the root. They are computed for one level of the
    trie at a time."""
    total = len(byte) + 1
    end = np.full(total, total)
    levels_ended = np.zeros(total, np.int64)
    by_level = np.argsort(depth, kind="stable") + 1
    bounds = np.searchsorted(depth[by_level - 1], np.arange(1, int(depth.max(initial=0)) + 2))
    above = np.zeros(1, np.int64)
    for low, high in pairwise(bounds.tolist()):
        level = by_level[low:high]
        parent = above[np.searchsorted(above, level) - 1]
        followed = np.zeros(len(level), np.bool_)
        followed[:-1] = parent[:-1] == parent[1:]
        end[level] = np.where(followed, np.roll(level, -1), end[parent])
        levels_ended[level] = np.where(followed, 1, levels_ended[parent] + 1)
        above = level
    nodes = np.empty((total, 2), "<u4")
    nodes[0, 0] = NO_TOKEN << 8 | ROOT_BYTE
    nodes[1:, 0] = token << 8 | byte
    nodes[:, 1] = end - np.arange(total) << 8 | levels_ended
    return nodes.ravel()


# --- decoding -----------------------------------------------------------------------------------


class TokenTrie(NamedTuple):
    """A decoded trie."""

    eos: int
    """The end-of-sequence token; -1 if the vocabulary has none."""
    tokens: list[bytes]
    """The bytes of each token, from the offsets."""
    spelled: dict[int, bytes]
    """For each token, in the order of the nodes: the bytes on the path from the root to the token's
    node."""


def decode_trie(blob: bytes) -> TokenTrie:
    """Decodes a trie. The checks are at least as strict as those of AICI's guests.

    Raises ValueError if a size, an offset, an id or the order of siblings is not valid. Also raises
    ValueError if the size of a subtree, or the number of subtrees that end at a node, is wrong.
    """
    if len(blob) < 4 * HEADER_WORDS:
        raise ValueError(f"{len(blob)} bytes are too few; a header has {4 * HEADER_WORDS}")
    header = np.frombuffer(blob, "<u4", HEADER_WORDS).tolist()
    magic, header_size, node_bytes, offset_bytes, data_bytes, size, eos = header
    _must(magic == MAGIC, f"its magic number is {magic:#x}, not {MAGIC:#x}")
    _must(header_size == 4 * HEADER_WORDS, f"its header has {header_size} bytes, not 28")
    _must(node_bytes % 8 == 0 and node_bytes >= 8, f"{node_bytes} bytes of nodes")
    _must(offset_bytes == 4 * size, f"{offset_bytes} bytes of offsets for {size} tokens")
    whole = header_size + node_bytes + offset_bytes + data_bytes
    _must(len(blob) == whole, f"it has {len(blob)} bytes, but its header gives {whole}")
    nodes = np.frombuffer(blob, "<u4", node_bytes // 4, header_size).reshape(-1, 2).tolist()
    offsets = np.frombuffer(blob, "<u4", size, header_size + node_bytes).tolist()
    data = blob[header_size + node_bytes + offset_bytes :]
    tokens = []
    for number, offset in enumerate(offsets):
        at, length = offset >> 8, offset & 0xFF
        _must(at + length <= len(data), f"token {number} ends at {at + length} of {len(data)}")
        tokens.append(data[at : at + length])
    return TokenTrie(-1 if eos == 0xFFFF_FFFF else eos, tokens, _spelled(nodes, size))


def _spelled(nodes: list[list[int]], size: int) -> dict[int, bytes]:
    """Walks the nodes by their subtrees, as a guest does, and checks that they are consistent."""
    _must(nodes[0] == [NO_TOKEN << 8 | ROOT_BYTE, len(nodes) << 8], f"the root is {nodes[0]}")
    spelled: dict[int, bytes] = {}
    path = bytearray()
    ends = [len(nodes)]
    """The ends of the subtrees on the path, beginning with the root's."""
    sibling = -1
    """The byte of the previous sibling; -1 for a first child."""
    for at, (first, second) in enumerate(nodes[1:], 1):
        token, byte = first >> 8, first & 0xFF
        end, levels = at + (second >> 8), second & 0xFF
        _must(at < end <= ends[-1], f"node {at}'s subtree ends at {end}, its parent's {ends[-1]}")
        again = byte == sibling and end == at + 1 and token != NO_TOKEN
        _must(byte > sibling or again, f"node {at} has byte {byte} after {sibling}")
        path.append(byte)
        ends.append(end)
        _must(levels == ends.count(end) - (end == len(nodes)), f"node {at}: {levels} levels end")
        if token != NO_TOKEN:
            _must(token < size, f"node {at} has token {token} of {size}")
            _must(token not in spelled, f"token {token} occurs twice")
            spelled[token] = bytes(path)
        else:
            _must(end > at + 1, f"node {at} is a leaf without a token")
        sibling = -1
        while len(ends) > 1 and ends[-1] == at + 1:
            ends.pop()
            sibling = path.pop()
    return spelled


def _must(held: bool, otherwise: str) -> None:
    if not held:
        raise ValueError(f"not a token trie: {otherwise}")
