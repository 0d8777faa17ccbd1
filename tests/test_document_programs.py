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


def test_it_is_the_main_program_of_its_folder(tmp_path):
    assert run("python", LAUNCHES % 1, tmp_path) == f"{tmp_path}\n"


TESTS = """
import pytest


@pytest.mark.ranks(2)
def test_it():
    assert 1 == 2
"""


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import torch\ntorch.ones(2) + torch.ones(3)", "must match"),
        (LAUNCHES % 2, "only rank 0 is well"),
        ("def test_it():\n    assert 1 == 2", "assert 1 == 2"),
        (TESTS, "test_it on 2 ranks"),
        ("import sys\nsys.exit(3)", "ended with 3"),
        ("import os\nos._exit(1)", "exit"),
    ],
)
def test_a_broken_program_fails(code, message, tmp_path):
    with pytest.raises(RankFailedError, match=message):
        run("python", code, tmp_path)


def test_commands_see_the_files_of_their_folder(tmp_path):
    (tmp_path / "mine.py").write_text("import sys\nprint(__name__, sys.argv[1:])")
    assert run("bash", "python mine.py 1 '2 3'  # words", tmp_path) == "__main__ ['1', '2 3']\n"
    assert run("bash", "A=4 python mine.py $(echo 5)", tmp_path) == "__main__ ['5']\n"


@pytest.mark.parametrize("command", ["python -m no.such.module", "python -m json.tool missing"])
def test_a_broken_command_fails(command, tmp_path):
    with pytest.raises(RankFailedError):
        run("bash", command, tmp_path)


def test_a_broken_command_of_the_shell_fails(tmp_path):
    with pytest.raises(subprocess.CalledProcessError):
        run("bash", "false; echo later", tmp_path)
