"""Where checkpoints and the journal live."""
