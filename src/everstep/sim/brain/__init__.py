"""Hosts, workers and faults in virtual time."""
