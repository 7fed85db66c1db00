"""A host's process: it starts, watches and ends the workers there."""
