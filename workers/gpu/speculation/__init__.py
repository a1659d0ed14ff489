"""Drafts: tokens that are likely to follow a sequence, verified in the forward of its next step."""
