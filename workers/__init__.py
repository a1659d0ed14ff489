"""Shared by every worker: its connection to the bus, registration, heartbeats, draining."""
