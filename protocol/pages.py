"""Computes the keys of pages. A page is 256 tokens of a prompt. Workers report the content of their
KV caches in pages, and the broker looks up prompts by pages.

The key of a page is a hash of its content, of all content before it in the prompt, and of the
model. The blocks of a KV cache may be smaller than a page. As long as a KV cache has the last block
of a page, the page counts as cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b

PAGE_TOKENS = 256
"""Tokens in a page. The block size of each KV cache divides this number."""
PAGE_BYTES = 4 * PAGE_TOKENS
"""Bytes of a page. Each of its token ids is a little-endian u32. A page of text has the same number
of bytes, because a token stands for about 4 bytes of text."""
KEY_BYTES = 8


def first_key(model: str, kind: str = "tokens") -> bytes:
    """The argument ``before`` of ``next_key`` for the first page of a prompt. ``kind``: ``tokens``
    or ``text``."""
    return blake2b(f"{kind}:{model}".encode(), digest_size=KEY_BYTES).digest()


def next_key(before: bytes, content: bytes | memoryview) -> bytes:
    """The key of the page with this content that follows the page with the key ``before``."""
    return blake2b(content, digest_size=KEY_BYTES, key=before).digest()


def page_keys(first: bytes, content: bytes, max_pages: int) -> Iterator[bytes]:
    """The keys of the full pages of a prompt, of at most ``max_pages`` pages."""
    key, view = first, memoryview(content)
    for start in range(0, min(len(content) // PAGE_BYTES, max_pages) * PAGE_BYTES, PAGE_BYTES):
        key = next_key(key, view[start : start + PAGE_BYTES])
        yield key


def join_keys(keys: list[bytes]) -> bytes:
    """Encodes keys as an attachment."""
    return b"".join(keys)


def split_keys(attachment: bytes) -> list[bytes]:
    """The keys in an attachment; an incomplete key at the end is ignored."""
    last = len(attachment) - KEY_BYTES
    return [attachment[at : at + KEY_BYTES] for at in range(0, last + 1, KEY_BYTES)]
