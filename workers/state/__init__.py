"""The state worker: the variables that the sequences of a request share."""
