"""Benchmarks: every one runs all its peers in the same process and run."""
