"""How a group of workers becomes a distributed job, by framework."""
