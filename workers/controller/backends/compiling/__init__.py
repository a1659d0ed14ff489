"""Compiles grammars in processes that can be killed, each grammar once, and measures the time.

``processes`` starts and ends the processes, ``bounds`` has their bounds, and ``process`` is the
program that each of them runs. ``shared`` compiles a grammar once for several simultaneous
requests. ``meter`` measures the time.
"""
