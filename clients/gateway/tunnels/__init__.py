"""The connections of WebSockets to the broker, over which LMTP is served."""
