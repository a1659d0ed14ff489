"""The gateway: serves the bus over HTTP and WebSocket.

A gateway is a client of the bus. No other process depends on the state of a gateway. So a gateway
process can be restarted at any time, and several gateways can share one port.
"""
