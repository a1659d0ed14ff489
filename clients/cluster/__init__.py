"""GPU and controller workers on the nodes of a Ray cluster: ``tokenbus up --ray``.

Ray places processes and restarts them, and that is all: workers dial the broker, and tokens go over
ZeroMQ.
"""
