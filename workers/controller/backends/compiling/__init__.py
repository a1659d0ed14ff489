"""Compiling grammars: in processes that can be ended, each grammar once, and measured.

``processes`` has the processes and their bounds, ``process`` is what runs in one. ``shared``
compiles once what several requests ask for at the same time. ``meter`` counts how long it takes.
"""
