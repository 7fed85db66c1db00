"""Hosts that are agents on this machine."""
