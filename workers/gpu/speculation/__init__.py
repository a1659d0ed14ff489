"""Speculative decoding: draft tokens are verified in the forward of a sequence's next step."""
