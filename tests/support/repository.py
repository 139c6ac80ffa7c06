"""Where things lie in this repository, for tests and their helpers in any folder."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
FIXTURES = ROOT / "tests" / "convert" / "fixtures"
