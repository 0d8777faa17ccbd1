"""A plan as tables and a page says what its estimates say."""

import re
from html import escape

import pytest
from plan_sketches import model

from scaletorch.plan import (
    Affine,
    Behaviour,
    Cluster,
    Cut,
    Device,
    Link,
    Options,
    Parameter,
    Work,
    plan,
)
from scaletorch.plan.estimate import in_bytes, in_seconds, in_short
from scaletorch.plan.tables import explained, page, table

GIB = 2**30


def planned(memory=80 * GIB, cuts=(1, 2)):
    kinds = {
        Cut(tp): 3 * (Behaviour(
            (Parameter("w", 2**30, 4, 2**30 // tp),), kept=Affine(0, GIB / tp),
            handed=Affine(0, 2**20), work=(Work("matmul", 1, Affine(0, 1e12), Affine()),),
        ),)
        for tp in cuts
    }  # fmt: skip
    device = Device("A <quick> one", memory, {"float32": 1e14}, 1e12, group_memory=GIB)
    cluster = Cluster(4, device, (Link(2, 3e-6, 300e9), Link(4, 8e-6, 25e9)))
    options = Options(schedules=(("1f1b", 1),), micro_rows=(1, 2))
    return plan(model(kinds, 4, "a & b", 4096), 16, cluster, options=options)


@pytest.fixture(scope="module")
def found():
    return planned()


def test_the_table_says_what_fits_and_how_quick_it_is(found):
    text = table(found, 3)
    rows = [line.split() for line in text.splitlines()]
    best = found.best()
    (first,) = (row for row in rows if row[:1] == ["1"] and "x" in row[1])
    grid = best.layout.grid
    assert first[1] == f"{grid.dp}x{grid.pp}x{grid.cp}x{grid.tp}"
    assert f"{best.peak / GIB:.2f}" in first
    assert first[-1] == in_short(16 * 4096 / best.time.step)
    assert f"{len(found.legal)} legal layouts; {len(found.illegal)} grids are refused" in text
    assert "refused: 2x1x2x1 and 4 like it: a & b is not described for tp 1, cp 2" in text
    assert "steps are estimates: the first takes" in text


def test_one_layout_and_none_at_all():
    text = table(planned(memory=2 * GIB))
    assert "no layout fits in 2 GiB: take more ranks" in text
    assert re.search(r"\d! ", text)
    assert "does not fit in 2 GiB, even with zero" in text
    assert "is not described for tp 1" in table(planned(cuts=()))


def test_a_layout_in_full(found):
    best = next(each for each in found.ranked() if each.layout.grid.pp > 1)
    text = explained(found, best)
    own, shared = in_bytes(best.peak), in_bytes(best.communicators)
    assert f"{own} on the fullest rank, {shared} of it communicators: fits in 80 GiB" in text
    own = best.memory[best.fullest]
    figures = (own.parameters, own.gradients, own.optimizer, own.activations)
    said = r" +".join(f"{size / GIB:.2f}" for size in figures)
    assert re.search(rf"\n{best.fullest} +{said}", text)
    assert f"step {in_seconds(best.time.step)} ({in_seconds(best.time.low)} to" in text


def test_the_page_stands_alone(found):
    text = page(found)
    assert not any(each in text for each in ("<script", "href", "url(", "http:", "https:"))
    assert escape(table(found)) in text
    assert escape(explained(found, found.best())) in text
    assert "Plan for a &amp; b on 4 x A &lt;quick&gt; one" in text
