"""The connection of workers and clients to the broker: a DEALER socket with its own thread."""
