"""`python -m shardstep`: the command line, where the command itself is not on the path."""

from __future__ import annotations

from shardstep.cli import main

main()
