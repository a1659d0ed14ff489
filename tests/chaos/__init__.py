"""Streams of every kind while processes are killed and stopped: each ends as if nothing was."""
