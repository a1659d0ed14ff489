"""Responses that users have stored, in a database that all gateways of a run directory share."""
