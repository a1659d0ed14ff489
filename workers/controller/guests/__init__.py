"""Runs the guests of each tenant in a separate process, whose CPU time and memory count for the
tenant."""
