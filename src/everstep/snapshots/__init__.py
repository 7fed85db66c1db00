"""Snapshots of the training state: what they consist of, and where they lie. Knows no framework."""
