"""From the messages of the bus to an engine's requests, and from its outputs to messages."""
