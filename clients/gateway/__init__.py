"""The gateway: Tokenbus for clients that speak HTTP or WebSocket.

The gateway is a client of the bus, without state on which other processes depend. So any gateway
process can be restarted, and several can share one port.
"""
