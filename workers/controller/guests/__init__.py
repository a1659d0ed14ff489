"""Runs the guests of each tenant in a separate process. The CPU time and the memory of this process
count towards the tenant's shares."""
