"""Runs scripts, which clients upload as text. The interpreter of a script is a Wasm guest."""
