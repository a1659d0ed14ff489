"""The streams of an HTTP request at the bus, which all interfaces share."""
