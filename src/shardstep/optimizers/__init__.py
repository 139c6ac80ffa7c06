"""What is known about optimizer classes: found by trials, read from their options, and used to build instances."""
