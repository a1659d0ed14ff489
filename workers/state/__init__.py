"""The state worker. It stores the variables that the sequences of a request share, the tables of
tenants' controller modules, and saved contexts."""
