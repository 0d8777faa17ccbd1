"""The picture is XML, and its texts and marks say the same from top to bottom."""

from __future__ import annotations

from xml.etree import ElementTree as Xml

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaletorch.bisect.picture import STATES, Drawn, svg

SPACE = "{http://www.w3.org/2000/svg}"


def read(picture):
    """Each line of the picture from top to bottom: its texts, and the states of its two marks."""
    root = Xml.fromstring(picture)
    texts = {
        round(float(text.get("y"))): "".join(text.itertext()).strip()
        for text in root.iter(f"{SPACE}text")
        if float(text.get("x")) > 150
    }
    marks = {}
    for group in root.iter(f"{SPACE}g"):
        x, y = map(float, group.get("transform")[len("translate(") : -1].split())
        if x > 40:
            marks.setdefault(round(y + 4.55), []).append(group.find(f"{SPACE}title").text)
    assert set(marks) <= set(texts)
    return [(text, *marks[y]) for y, text in sorted(texts.items()) if y in marks]


def model(layers, wrong):
    """Layers of which one has a module where the forward pass goes wrong."""
    drawn = [Drawn("", "downstream", "good"), Drawn("embed", "good", "good")]
    for layer in range(layers):
        state = "good" if layer < wrong else "downstream"
        for module in ("", ".attention", ".attention.q", ".attention.o", ".mlp"):
            drawn.append(Drawn(f"layers.{layer}{module}", state, "good"))
    place = next(i for i, d in enumerate(drawn) if d.module == f"layers.{wrong}.attention.o")
    drawn[place - 1] = Drawn(f"layers.{wrong}.attention.q", "good", "good")
    drawn[place] = Drawn(f"layers.{wrong}.attention.o", "born", "good")
    return [*drawn, Drawn("head", "downstream", "unseen")]


def test_good_layers_are_folded_and_the_wrong_one_is_open():
    assert read(svg(model(40, 11), "tp 2")) == [
        ("the model", "downstream", "good"),
        ("embed", "good", "good"),
        ("layers.0-10 good", "good", "good"),
        ("layers.11", "downstream", "good"),
        ("attention", "downstream", "good"),
        ("q", "good", "good"),
        ("o ← born here, in forward", "born", "good"),
        ("mlp", "downstream", "good"),
        ("layers.12-39 forward downstream, backward good", "downstream", "good"),
        ("head", "downstream", "unseen"),
    ]


def test_two_layers_are_shown_each():
    lines = [line for line, *_ in read(svg(model(3, 2), ""))]
    assert lines[2:5] == ["layers.0 and 4 inside", "layers.1 and 4 inside", "layers.2"]


def test_wrong_layers_are_never_folded():
    drawn = [Drawn(f"layers.{i}", "bad", "born") for i in range(4)]
    assert [line for line, *_ in read(svg(drawn, ""))] == [
        f"layers.{i} ← born here, in backward" for i in range(4)
    ]


def test_two_hundred_modules_in_states_that_differ_have_a_line_each():
    drawn = [
        Drawn(f"layers.{i}.{name}", "born" if i % 2 else "bad", "downstream")
        for i in range(50)
        for name in ("a", "b", "c", "d")
    ]
    lines = read(svg(drawn, "much"))
    assert len(lines) == 200
    assert lines[4] == ("layers.1.a ← born here, in forward", "born", "downstream")


@pytest.mark.parametrize("state", STATES)
def test_a_legend_says_what_each_mark_means(state):
    picture = svg([Drawn("head", state, "elsewhere")], "a < b & c \x00")
    texts = ["".join(t.itertext()) for t in Xml.fromstring(picture).iter(f"{SPACE}text")]
    assert texts[0] == "a < b & c ?"
    assert f"{state}: {STATES[state][1]}" in texts
    assert f"unseen: {STATES['unseen'][1]}" in texts


def test_it_has_a_background_and_its_size():
    root = Xml.fromstring(svg([], ""))
    paper = root.find(f"{SPACE}rect")
    assert paper.get("fill") == "#ffffff"
    assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
    assert float(paper.get("width")) == float(root.get("width")) - 1


modules = st.lists(st.sampled_from(["layers", "0", "1", "2", "mlp", "<&>"]), max_size=4).map(
    ".".join
)
states = st.sampled_from([*STATES, ""])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.builds(Drawn, modules, states, states), max_size=12), st.text())
def test_nothing_wrong_is_left_out(drawn, title):
    last = {each.module: each for each in drawn}
    shown = read(svg(drawn, title))
    for way in (0, 1):
        for state in ("born", "bad"):
            there = sum((d.forward, d.backward)[way] == state for d in last.values())
            assert sum(marks[way] == state for _, *marks in shown) == there
