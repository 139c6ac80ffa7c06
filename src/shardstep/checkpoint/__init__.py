"""Checkpoints: all ranks write them, any number of ranks reads them, and they are either complete or do not exist."""
