"""The connections of HTTP clients: the server, its protocols, and the bounds of their bytes."""
