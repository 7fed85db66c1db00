"""What is saved of the training state: reports, checkpoints, snapshots in memory. Pure: it keeps count."""
