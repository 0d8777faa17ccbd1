"""Every program in the README runs as it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
PROGRAMS = [
    block
    for block in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    if "\n...\n" not in block  # that one is a sketch of a program under a launcher
]


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_readme(tmp_path, program):
    tests = re.findall(r"^def (test_\w+)\(\)", program, re.MULTILINE)
    if tests:
        calls = "\n".join(f"    {name}()" for name in tests)
        program += f'\n\nif __name__ == "__main__":\n{calls}\n'
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
