"""What workers and clients share to reach the broker: a DEALER socket with a thread of its own."""
