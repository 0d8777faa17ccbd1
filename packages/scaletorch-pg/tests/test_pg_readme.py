"""The README's programs run, and print what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scaletorch.parallel.pg_manager.__main__ import main

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
OUTPUTS = [text for language, text in BLOCKS if language == "text"]


def promised(program):
    """What the comments beside the prints say, in order."""
    return re.findall(r"^ *print\(.*\) {2,}# (.*)$", program, re.MULTILINE)


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_programs_print_what_they_promise(program, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(program)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    expected = promised(program) or OUTPUTS[0].splitlines()
    assert done.stdout.splitlines() == expected


def test_command_prints_what_is_shown(capsys):
    [console] = [text for language, text in BLOCKS if language == "console"]
    command, shown = console.split("\n", 1)
    assert main(command.removeprefix("$ python -m scaletorch.parallel.pg_manager").split()) == 0
    assert capsys.readouterr().out == shown
