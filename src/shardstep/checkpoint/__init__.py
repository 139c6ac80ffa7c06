"""Checkpoints: written by all ranks, read by any number of them, complete or not there."""
