"""Guests in processes of their own: one process for each tenant, which pays for its guests."""
