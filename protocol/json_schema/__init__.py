"""Rewrites the keywords of JSON schemas that llguidance does not implement into keywords that it
implements.

The controller worker rewrites a schema before it compiles the schema. The HTTP gateway rewrites the
same schema to find the keywords that the masks enforce.
"""

from .formats import KNOWN as FORMATS
from .rewriting import LOOK_AROUND, MAX_BYTES, Rewritten, needs_rewriting, rewritten

__all__ = ["FORMATS", "LOOK_AROUND", "MAX_BYTES", "Rewritten", "needs_rewriting", "rewritten"]
