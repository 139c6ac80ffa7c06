"""The command line: `shardstep`.

`app.py` holds the commands, `demo/` what `shardstep demo` does. This file imports neither, so that the parts that
need only torch (`shardstep.cli.demo.gpt`, the demo's workers) can be imported without the extras.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

EXTRAS = ("typer", "rich", "matplotlib")  # pyproject.toml: the extra named "cli"


def main() -> None:
    missing = [name for name in EXTRAS if find_spec(name) is None]
    if missing:
        print(
            f"shardstep: the command line needs {' and '.join(missing)}, not installed here; "
            'pip install "shardstep[cli]" brings what is missing.',
            file=sys.stderr,
        )
        sys.exit(1)
    # Only now: app.py imports the extras.
    from shardstep.cli.app import app

    app(prog_name="shardstep")
