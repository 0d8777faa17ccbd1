"""Files of checkpoints: flushed as a whole, and filled as far as they may be."""

import os
from unittest import mock

from scaletorch.checkpoint import exporting, files


def test_names_of_a_folder_are_flushed(tmp_path):
    with mock.patch.object(files.os, "fsync", side_effect=lambda fd: seen.append(os.fstat(fd))):
        seen = []
        files.flush_folder(tmp_path)
        with (tmp_path / "file").open("wb") as file:
            files.flush(file)
    assert [each.st_ino for each in seen] == [
        p.stat().st_ino for p in (tmp_path, tmp_path / "file")
    ]


def test_a_file_holds_as_many_bytes_as_it_may(monkeypatch):
    monkeypatch.setattr(exporting, "_bytes", lambda size: size)
    assert list(exporting._split([2, 2, 1, 3, 5, 1], 4)) == [[2, 2], [1, 3], [5], [1]]
    assert list(exporting._split([], 4)) == []
