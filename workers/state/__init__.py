"""The state worker: the variables that the sequences of a request share, and the tables of tenants'
controller modules."""
