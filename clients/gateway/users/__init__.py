"""The users of a gateway: their API keys, their shares of its resources, and their turns."""
