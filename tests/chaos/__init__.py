"""Runs streams of every kind while processes are killed and stopped, and compares their results."""
