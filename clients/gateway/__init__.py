"""The gateway: serves a Tokenbus over HTTP and WebSocket.

A gateway is a client of the bus. Other processes do not depend on its state, so that any gateway
process can be restarted, and several can share one port.
"""
