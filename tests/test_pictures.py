"""The guides' pictures are what the library draws today."""

import pytest
from tools.pages.pictures import FOLDER, PICTURES


@pytest.mark.parametrize("name", PICTURES)
def test_the_picture_is_as_it_is_drawn(name):
    assert (FOLDER / f"{name}.svg").read_text(encoding="utf-8") == PICTURES[name](), (
        "write them anew: python -m tools.pages.pictures"
    )


def test_every_picture_is_shown_in_both_languages():
    pages = {p: p.read_text(encoding="utf-8") for p in FOLDER.parent.rglob("*.md")}
    for name in PICTURES:
        shown = [p for p, text in pages.items() if f"pictures/{name}.svg)" in text]
        assert any(p.parent.name == "zh" for p in shown), name
        assert any(p.parent.name != "zh" for p in shown), name


def test_every_file_is_a_picture_of_the_tool():
    assert {p.stem for p in FOLDER.iterdir()} == {*PICTURES}
