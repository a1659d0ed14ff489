"""The forward on a CPU in native code."""
