"""A program of a document that is broken fails, wherever it is broken."""

import subprocess

import pytest
from document_programs import run

from scaletorch.dist import RankFailedError

LAUNCHES = """
import os

from scaletorch.dist import get_rank, launch


def work():
    assert get_rank() < 1, "only rank 0 is well"
    return os.getcwd()


if __name__ == "__main__":
    print(launch(work, %d)[0])
"""


TESTS = """
import pytest


@pytest.mark.ranks(2)
def test_it():
    assert 1 == 2
"""


@pytest.mark.parametrize(
    ("language", "code", "message"),
    [
        ("python", "import torch\ntorch.ones(2) + torch.ones(3)", "must match"),
        ("python", LAUNCHES % 2, "only rank 0 is well"),
        ("python", "def test_it():\n    assert 1 == 2", "assert 1 == 2"),
        ("python", TESTS, "test_it on 2 ranks"),
        ("python", "import sys\nsys.exit(3)", "ended with 3"),
        ("python", "import os\nos._exit(1)", "exit"),
        ("bash", "python -m no.such.module", "no.such"),
        ("bash", "python -m json.tool missing", "missing"),
    ],
)
def test_a_broken_program_fails(language, code, message, tmp_path):
    with pytest.raises(RankFailedError, match=message):
        run(language, code, tmp_path)


def test_programs_and_commands_see_the_files_of_their_folder(tmp_path):
    assert run("python", LAUNCHES % 1, tmp_path) == f"{tmp_path}\n"
    (tmp_path / "mine.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    assert run("bash", "python mine.py 1 '2 3'  # words", tmp_path) == "__main__ ['1', '2 3']\n"
    assert run("bash", "A=4 python mine.py $(echo 5)", tmp_path) == "__main__ ['5']\n"


def test_a_broken_command_of_the_shell_fails(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        run("bash", "false; echo later", tmp_path)
