"""The controller of a run: events in, commands out. Pure: no I/O, no clock, no threads, no randomness."""
