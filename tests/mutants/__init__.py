"""Seeds faults in the broker, to check whether the tests find them."""
