"""A plan as tables and a page says what its estimates say."""

import re
from xml.etree import ElementTree as Xml

import pytest

from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan import Cluster, Device, Estimate, Layout, Link, Memory, Time, Traffic
from scaletorch.plan.showing import Shown, explained, page, table
from scaletorch.plan.showing.shown import grouped, options_of, sent_by_axis
from scaletorch.plan.units import in_bytes, in_seconds, in_short

GIB = 2**30
LINKS = (Link(8, 3e-6, 300e9), Link(64, 8e-6, 25e9))
CLUSTER = Cluster(64, Device("A <quick> one", 80 * GIB, {"bfloat16": 1e14}, 1e12), LINKS)


def estimate(grid, gib=5, seconds=4.0, **options):
    memory = tuple(
        Memory(gib * GIB, 2 * gib * GIB, gib * GIB, (grid.pp - at) * GIB, GIB // 2)
        for at in range(grid.pp)
    )
    sent = (Traffic("tp", "all_reduce", 512, 90 * 2**20), Traffic("cp_dp", "all_gather", 3, 7))
    time = Time(seconds, 3.4, {"tp": 0.4}, {"cp_dp": 0.3}, 0.095, 0.05, 3.5, 4.5)
    return Estimate(Layout(grid, **options), memory, (sent,) * grid.pp, time)


FIRST = estimate(
    Grid(tp=8, pp=4, dp=2), sequence_parallel=True, zero=1, micro_batches=32, recompute="full"
)
SECOND = estimate(Grid(tp=4, cp=2, dp=8, ep=8), 25, 5.0, zero=1, micro_rows=2, micro_batches=4)
REFUSED = [
    ("1x2x1x32", "tp = 32 is 0.5 too many"),
    ("1x1x1x64", "tp = 64 is 12 too many"),
    ("1x64x1x1", "no"),
]


def lines(layout):
    return [(f"weights of <{layout.grid.tp}>", 12345678), ("nothing", 0)]


SHOWN = Shown("a & b", 4096, 256, CLUSTER, [FIRST, SECOND], 1, REFUSED, lines, notes=["So it is."])


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_says_what_fits_and_how_quick_it_is(width):
    text = table(SHOWN, width=width)
    assert max(map(len, text.splitlines())) <= width
    rows = [line.split() for line in text.splitlines()]
    first, second = (next(row for row in rows if row[:1] == [at] and "x" in row[1]) for at in "12")
    assert first[1] == "2x4x1x8"
    assert "24.50" in first
    assert first[-3:] == ["4", "s", "262k"]
    assert second[1] == "8x1x2x4-ep8"
    assert "102!" in second
    assert "all of these: zero 1\n" in text
    assert "! is more than 80 GiB" in text
    assert "1 layouts fit; 3 do not, or cannot be" in text
    assert "refused: 1x2x1x32 and 1 like it: tp = 32 is 0.5 too many" in text
    assert bool(re.search(r"MiB sent +tp", text)) == (width == 120)  # left out for want of room
    assert text.endswith("note: So it is.")


def test_one_layout_and_none_at_all():
    alone = table(Shown("m", 8, 8, CLUSTER, [SECOND], 0))
    assert "zero 1" in alone
    assert "none fits in 80 GiB" in alone
    assert "0 layouts fit" in table(Shown("m", 8, 8, CLUSTER, [], 0, REFUSED))


def test_a_layout_in_full():
    text = explained(SHOWN, FIRST)
    assert "24.5 GiB on the fullest rank: fits in 80 GiB" in text
    assert re.search(r"0 +5\.00 +10\.00 +5\.00 +4\.00 +0\.50 +0\.00 +24\.50  fullest", text)
    assert "12,345,678" in text
    assert "nothing" not in text
    assert re.search(r"tp +all_reduce +512 calls +94,371,840 bytes", text)
    assert "step 4 s (3.5 s to 4.5 s)" in text


def test_options_are_those_that_matter():
    assert options_of(Layout(Grid(), True, cp_method="ulysses")) == ["1 x 1 row"]
    many = Layout(Grid(tp=2, cp=2, pp=2), True, "offload", 2, "zb_v", 2, "ulysses", 4, 8)
    assert options_of(many) == [
        "sp", "ulysses", "zero 2", "recompute offload", "zb_v", "2 chunks", "8 x 4 rows",
    ]  # fmt: skip


def test_what_is_sent_is_that_of_the_rank_that_sends_most():
    first, last = (
        (Traffic("pp", "send", 1, 5), Traffic("edp", "x", 1, 2)),
        (Traffic("pp", "x", 1, 3),),
    )
    own = Estimate(FIRST.layout, FIRST.memory, (first, last))
    assert sent_by_axis(own) == {"tp": 0, "cp": 0, "ep": 0, "pp": 5, "dp": 2}


def test_numbers_in_words():
    assert [in_bytes(size) for size in (0, 1023, 1024, 80 * GIB, 1023 * GIB)] == [
        "0 B", "1023 B", "1 KiB", "80 GiB", "1,023 GiB",
    ]  # fmt: skip
    assert [in_seconds(each) for each in (2e-6, 0.0125, 3, 2000)] == [
        "2 µs", "12.5 ms", "3 s", "2,000 s",
    ]  # fmt: skip
    assert [in_short(each) for each in (12, 1500, 2.5e9)] == ["12", "1.5k", "2.5B"]


def test_reasons_that_differ_in_numbers_are_one():
    assert list(grouped(REFUSED)) == [
        (2, "1x2x1x32", "tp = 32 is 0.5 too many"), (1, "1x64x1x1", "no"),
    ]  # fmt: skip


def test_the_page_stands_alone():
    text = page(SHOWN)
    assert "<script" not in text
    assert "href" not in text
    assert "url(" not in text
    assert set(re.findall(r"https?://[^\"' ]+", text)) <= {"http://www.w3.org/2000/svg"}
    assert "prefers-color-scheme: dark" in text
    body = text[text.index("<body>") : text.index("</body>") + len("</body>")]
    root = Xml.fromstring(body)  # every element is closed and every name escaped
    words = " ".join(root.itertext())
    assert "Plan for a & b on 64 x A <quick> one" in words
    assert "weights of <8>" in words
    for said in (
        "2x4x1x8",
        "24.5 GiB",
        "tp = 32 is 0.5 too many",
        "12,345,678",
        "So it is.",
        "262k",
    ):
        assert said in words, said


def test_the_page_of_no_layout():
    assert "No layout is legal" in page(Shown("m", 8, 8, CLUSTER, [], 0, REFUSED))
