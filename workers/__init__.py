"""Code that all workers share: the connection to the bus, registration, heartbeats and draining."""
