"""Compiles grammars in processes that can be killed, each grammar once, and measures the time.

``processes`` has the processes and their bounds, and ``process`` runs in each of them. ``shared``
compiles a grammar once for several simultaneous requests. ``meter`` measures the time.
"""
