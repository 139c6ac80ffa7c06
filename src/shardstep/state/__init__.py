"""Remembers: the optimizer's state in a form that knows nothing of world size or layout."""
