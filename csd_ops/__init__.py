"""The acceptance mathematics: one reference, then one file per way to run it."""
