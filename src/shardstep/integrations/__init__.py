"""One file for each framework, imported when asked for: `from shardstep.integrations.lightning import ...`."""
