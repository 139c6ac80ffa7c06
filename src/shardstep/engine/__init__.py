"""One training step, and what it works on: built for a plan, and replaced with it."""
