"""Steps this rank's share, with the caller's own optimizer class."""
