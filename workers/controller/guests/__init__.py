"""Runs the guests of each tenant in a separate process, the *guest process*. The CPU time and the
memory of this process count towards the tenant's shares.

A guest process is *compromised* if a guest has escaped from the Wasm sandbox and controls the
process. The worker does not trust any message of a guest process, because the process may be
compromised.
"""
