"""How amounts are written, in reports and on the command line."""

from __future__ import annotations

UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def format_nbytes(nbytes: float) -> str:
    for factor, unit in UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"
