"""The connections of workers and clients to the broker: DEALER sockets, or queues in memory."""
