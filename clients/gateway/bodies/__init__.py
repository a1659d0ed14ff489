"""The bodies of requests: how they are read, bounded and decoded."""
