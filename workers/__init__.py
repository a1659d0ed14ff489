"""What every worker shares: its connection to the bus, registration, heartbeats, draining."""
