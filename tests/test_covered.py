"""Lines count that ranks and other processes run."""

import os
import shutil
import subprocess
import sys

from tools.testing import covered
from tools.testing.covered import Covered

MODULE = """
import os

def in_rank():
    return 1

def in_process():
    os._exit(0)

def killed():
    os.kill(os.getpid(), 9)

def never():
    a = 1
    return a
"""

PROGRAM = """
import subprocess, sys
from scaletorch.dist import RankFailedError
from scaletorch.dist.testing import run_ranks
import tiny

if __name__ == "__main__":
    assert run_ranks(tiny.in_rank, 2) == [1, 1]
    try:
        run_ranks(tiny.killed, 2)  # the same ranks, which do not leave by themselves
    except RankFailedError:
        pass
    subprocess.run([sys.executable, "-c", "import tiny; tiny.in_process()"], check=True)
"""


def test_ranks_and_programs_count(tmp_path, monkeypatch):
    monkeypatch.setattr(covered, "portions", lambda package: ["tiny"])
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "__init__.py").write_text(MODULE)
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "sitecustomize.py").write_text(covered.START)
    shutil.copy(covered.START_MODULE, tmp_path)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, *covered.measuring("tiny", tmp_path), "program.py"]
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run(words, cwd=tmp_path, env=environment, check=True, timeout=200)
    found = covered.collect("tiny", tmp_path)
    assert found == Covered("tiny", 10, 7, {"tiny/__init__.py": [11, 14, 15]})
    assert covered.table([found]).endswith("tests do not run:\n  tiny/__init__.py: 11, 14-15")


def test_a_table_names_what_is_below_the_bound():
    text = covered.table(
        [Covered("a", 200, 190, {"x.py": [1]}), Covered("b", 10, 8, {"y.py": [3]})]
    )
    assert "a                    200      190    95.0\n" in text
    assert "b                     10        8    80.0  below 90\n" in text
    assert "y.py: 3" in text
    assert "x.py" not in text


def test_lines_in_words():
    assert covered.ranges([1, 3, 4, 5, 9, 10]) == "1, 3-5, 9-10"
