"""GPU and controller workers on the nodes of a Ray cluster: ``tokenbus up --ray``.

Ray only places processes and restarts them. Workers connect to the broker, and tokens travel over
ZeroMQ.
"""
