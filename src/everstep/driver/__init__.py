"""The loop around the brain: events in, commands out; journal, display, result."""
