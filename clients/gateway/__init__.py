"""The gateway: Tokenbus for clients that speak HTTP or WebSocket.

A client of the bus like any other, without state that matters: any gateway process can be ended and
started again, and several can share one port.
"""
