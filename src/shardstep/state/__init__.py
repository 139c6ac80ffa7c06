"""The optimizer's state in a form that does not depend on world size or layout: for state_dicts and checkpoints."""
