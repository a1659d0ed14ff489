"""Chat templates and the separate processes that render them."""
