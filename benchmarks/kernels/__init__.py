"""Kernel benchmarks: every operation against the core's own code and against its floor."""
