"""The README's program does what it says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_program_runs(tmp_path):
    [program] = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.removeprefix("rank 0") == second.removeprefix("rank 1")
    assert first.endswith("shard (16, 16) of (32, 16)")
