"""The connection of workers and clients to the broker: a DEALER socket with a thread of its own."""
