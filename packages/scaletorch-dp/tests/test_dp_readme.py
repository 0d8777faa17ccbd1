"""The README's snippet runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_snippet_runs(tmp_path):
    readme = Path(__file__).parents[1] / "README.md"
    (snippet,) = re.findall(r"```python\n(.*?)```", readme.read_text("utf-8"), re.DOTALL)
    program = tmp_path / "program.py"
    program.write_text(snippet, "utf-8")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("5 tensor(")
