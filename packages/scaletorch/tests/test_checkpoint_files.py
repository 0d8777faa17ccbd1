"""Files of checkpoints: flushed as a whole, and filled as far as they may be."""

import os
from types import SimpleNamespace
from unittest import mock

from scaletorch.checkpoint import exporting
from scaletorch.checkpoint.format import files


def test_names_of_a_folder_are_flushed(tmp_path):
    with mock.patch.object(files.os, "fsync", side_effect=lambda fd: seen.append(os.fstat(fd))):
        seen = []
        files.flush_folder(tmp_path)
        with (tmp_path / "file").open("wb") as file:
            files.flush(file)
    assert [each.st_ino for each in seen] == [
        p.stat().st_ino for p in (tmp_path, tmp_path / "file")
    ]


def test_a_file_holds_as_many_bytes_as_it_may():
    wholes = [SimpleNamespace(nbytes=size) for size in (2, 2, 1, 3, 5, 1)]
    files = [[one.nbytes for one in file] for file in exporting._split(wholes, 4)]
    assert files == [[2, 2], [1, 3], [5], [1]]
    assert list(exporting._split([], 4)) == []
