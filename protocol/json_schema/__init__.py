"""Rewrites the keywords of JSON schemas that llguidance does not implement into keywords that it
implements.

The controller worker rewrites the schemas that it compiles. The HTTP gateway rewrites the same
schemas to find which keywords the masks enforce.
"""

from .formats import KNOWN as FORMATS
from .rewriting import LOOK_AROUND, MAX_BYTES, Rewritten, needs_rewriting, rewritten

__all__ = ["FORMATS", "LOOK_AROUND", "MAX_BYTES", "Rewritten", "needs_rewriting", "rewritten"]
