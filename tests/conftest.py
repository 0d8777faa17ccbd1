"""Tests import the repository's tools, what lies beside them, and what the umbrella's tests do."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests"), str(ROOT / "packages" / "scaletorch" / "tests")]
