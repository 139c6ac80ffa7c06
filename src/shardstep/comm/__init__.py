"""Sends: the only part that talks to other ranks. Which backend carries a message is decided here, once."""
