"""Benchmarks: each runs Everstep and its peer, Ray Train, in one run, and prints a ratio."""
