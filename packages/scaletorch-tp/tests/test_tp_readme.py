"""The README's programs do what it says."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def output_of(number, folder):
    programs = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    script = folder / "program.py"
    script.write_text(programs[number], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_program_trains(tmp_path):
    first, second = output_of(0, tmp_path).splitlines()
    assert first.removeprefix("rank 0") == second.removeprefix("rank 1")
    assert first.endswith("shard (16, 16) of (32, 16)")


def test_the_explanation_is_the_one_that_is_shown(tmp_path):
    assert f"```\n{output_of(1, tmp_path)}```\n" in README.read_text(encoding="utf-8")


def test_the_sequence_parallel_program_holds_shares(tmp_path):
    expected = "[((1, 5, 16), (1, 9, 64)), ((1, 4, 16), (1, 9, 64))]"
    assert output_of(2, tmp_path).strip() == expected
