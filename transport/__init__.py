"""What workers and clients share to reach the broker: a DEALER socket on a thread of its own."""
