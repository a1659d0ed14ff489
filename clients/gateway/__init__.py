"""The gateway: serves the bus over HTTP and WebSocket.

A gateway is a client of the bus. No other process depends on the state of a gateway. Any gateway
process can therefore be restarted, and several gateways can share one port.
"""
