"""The loop around the controller: events in, commands out; journal, display, result."""
