"""Seeded faults in the broker, to see whether the tests notice them."""
