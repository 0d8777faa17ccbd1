"""The README's snippets run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def test_the_snippets_run(tmp_path):
    readme = Path(__file__).parents[1] / "README.md"
    snippets = re.findall(r"```python\n(.*?)```", readme.read_text("utf-8"), re.DOTALL)
    shown = []
    for snippet in snippets:
        program = tmp_path / "program.py"
        program.write_text(snippet, "utf-8")
        done = subprocess.run(
            [sys.executable, program], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
    assert shown[0].startswith("5 tensor(")
    assert shown[1].startswith("0 [('weight', 0, 13)")
