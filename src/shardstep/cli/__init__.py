"""The command line: `shardstep`.

`app.py` has the commands, and `demo/` the code of `shardstep demo`. This file imports neither, so that modules that
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
            f"shardstep: the command line needs {' and '.join(missing)}, not installed here: "
            'run pip install "shardstep[cli]".',
            file=sys.stderr,
        )
        sys.exit(1)
    # Imported here, because app.py imports the extras.
    from shardstep.cli.app import app

    app(prog_name="shardstep")
