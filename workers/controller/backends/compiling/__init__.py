"""Compiles each grammar once, in a process that can be killed, and measures the time.

``processes`` starts and ends the processes, ``bounds`` has their bounds, and ``process`` is the
program that each of them runs. ``shared`` compiles a grammar once for several simultaneous
requests. ``meter`` measures the time.
"""
