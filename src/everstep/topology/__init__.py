"""Accelerators and slices: facts and arithmetic only."""
