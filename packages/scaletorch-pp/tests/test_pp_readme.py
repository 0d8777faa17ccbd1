"""The README's snippets run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_snippet(index, tmp_path):
    program = tmp_path / "snippet.py"
    program.write_text(SNIPPETS[index], encoding="utf-8")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if "launch(" in SNIPPETS[index]:
        first, last = done.stdout.splitlines()
        assert first.startswith("0 ['embed.weight', 'layers.0.up.weight'")
        assert first.endswith(" 0.0")
        assert last.startswith("1 ['layers.3.up.weight'")
        assert float(last.rpartition(" ")[2]) < 4
