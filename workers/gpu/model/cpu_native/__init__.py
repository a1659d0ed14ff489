"""The forward of few tokens on a CPU in native code."""
