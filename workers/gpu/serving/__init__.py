"""Turns bus messages into an engine's requests, and an engine's outputs into bus messages."""
