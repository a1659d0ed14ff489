"""The broker: registry, routing, admission and flow control between clients and workers."""
