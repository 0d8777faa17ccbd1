"""The pictures of the guides, drawn from the library's own objects.

`python -m tools.pages.pictures` writes them to `docs/pictures/`; a test compares them with the
files there.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from pathlib import Path
from xml.etree import ElementTree as Xml

from scaletorch.parallel.context_parallel import contiguous, stripe, zigzag
from scaletorch.parallel.pg_manager import Grid
from scaletorch.parallel.pipeline_parallel import SCHEDULES, Costs, check, simulate

from ..packages import ROOT

FOLDER = ROOT / "docs" / "pictures"
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44")  # of ranks; distinct for most readers
PALE, INK = "#eef1f5", "#222222"
SHOWN = ("1f1b", "interleaved_1f1b", "zb_v")  # schedules
RANKS, MICRO_BATCHES = 4, 8
KINDS = {  # colours of a rank's first stage and, paler, of its second
    "F": ("#4477aa", "#b4c7dd"), "B": ("#228833", "#a7cfad"),
    "I": ("#33a7cc", "#c2ebf8"), "W": ("#a89a20", "#ebe5b4"),
}  # fmt: skip
NAMES = ("forward", "backward", "of inputs", "of weights")


def canvas(width: float, height: float) -> Xml.Element:
    """Return an empty white picture."""
    root = Xml.Element("svg", xmlns="http://www.w3.org/2000/svg")
    root.attrib |= {"viewBox": f"0 0 {width:g} {height:g}", "font-family": "sans-serif"}
    Xml.SubElement(root, "rect", width="100%", height="100%", rx="6", fill="#ffffff")
    return root


def box(root: Xml.Element, x: float, y: float, width: float, height: float, fill: str) -> None:
    """Add a rectangle."""
    size = {"x": x, "y": y, "width": width, "height": height}
    Xml.SubElement(root, "rect", {k: f"{v:g}" for k, v in size.items()}, fill=fill)


def text(root: Xml.Element, x: float, y: float, words: str, **style: str) -> None:
    """Add a line of text."""
    place = {"x": f"{x:g}", "y": f"{y:g}", "font-size": "13", "fill": INK}
    Xml.SubElement(
        root, "text", place | {k.replace("_", "-"): v for k, v in style.items()}
    ).text = words


def finished(root: Xml.Element) -> str:
    """Return the file's text."""
    Xml.indent(root)
    return Xml.tostring(root, encoding="unicode") + "\n"


def grid() -> str:
    """Draw the sixteen ranks of a grid, and the data that each axis divides."""
    root, sizes = canvas(720, 300), Grid(tp=2, cp=2, pp=2, dp=2)
    for rank in range(sizes.world_size):
        at = sizes.coordinates(rank)
        x = 60 + at.dp * 330 + at.cp * 150 + at.tp * 62
        y = 70 + at.pp * 72
        box(root, x, y, 56, 56, COLOURS[2 * at.cp + at.tp])
        text(root, x + 28, y + 34, str(rank), font_size="18", fill="#ffffff", text_anchor="middle")
    for dp, cp in product(range(2), repeat=2):
        middle = 60 + dp * 330 + cp * 150 + 59
        text(root, middle, 56, f"cp {cp}", text_anchor="middle")
        text(root, middle - 31, 232, "tp 0", text_anchor="middle", fill="#777777")
        text(root, middle + 31, 232, "tp 1", text_anchor="middle", fill="#777777")
    for dp in range(2):
        words = f"dp {dp}: its rows of the batch"
        text(root, 60 + dp * 330 + 134, 28, words, text_anchor="middle", font_weight="bold")
    for pp in range(2):
        text(root, 14, 103 + pp * 72, f"pp {pp}")
    words = (
        "tp: its part of each weight · cp: its part of each sequence · pp: its part of the layers"
    )
    text(root, 360, 276, words, text_anchor="middle")
    return finished(root)


def masks() -> str:
    """Draw the rank that computes each pair of a causal mask, in three layouts."""
    root, side = canvas(720, 290), 12
    layouts = {"contiguous": contiguous(16, 4), "zigzag": zigzag(16, 4), "stripe": stripe(16, 4)}
    for n, (name, layout) in enumerate(layouts.items()):
        left, top = 24 + n * 236, 40
        text(root, left, 28, name, font_weight="bold")
        holders = {row: rank for rank in range(4) for row in layout.positions(rank).tolist()}
        for row in range(16):
            for column in range(16):
                fill = COLOURS[holders[row]] if column <= row else PALE
                box(root, left + column * side, top + row * side, side - 1, side - 1, fill)
    for rank in range(4):
        box(root, 150 + rank * 110, 252, 12, 12, COLOURS[rank])
        text(root, 168 + rank * 110, 263, f"rank {rank}")
    return finished(root)


def schedules() -> str:
    """Draw schedules on one time axis; a rank's layers together take 1 forward, 2 backward."""
    root, scale = canvas(720, 140 * len(SHOWN) + 40), 18
    for n, name in enumerate(SHOWN):
        top, schedule = 30 + 140 * n, SCHEDULES[name](RANKS, MICRO_BATCHES)
        share = schedule.num_ranks / schedule.num_stages
        timeline = simulate(schedule, Costs(share, 2 * share, share, share))
        words = f"makespan {timeline.makespan:g}, bubble {100 * timeline.bubble:.1f} %"
        text(root, 64, top, f"{name}: {words}", font_weight="bold")
        for rank in range(RANKS):
            text(root, 14, top + 24 + 24 * rank, f"rank {rank}")
            box(root, 64, top + 10 + 24 * rank, timeline.makespan * scale, 20, PALE)
        for rank, action, start, end in timeline.spans:
            x, y, width = 64 + start * scale, top + 10 + 24 * rank, (end - start) * scale
            box(root, x, y, width - 0.5, 20, KINDS[action.kind][action.chunk])
            if width > 8 * len(str(action.micro_batch)):
                middle, ink = x + width / 2, ("#ffffff", INK)[action.chunk]
                words = str(action.micro_batch)
                text(root, middle, y + 14, words, font_size="11", fill=ink, text_anchor="middle")
    for n, (kind, name) in enumerate(zip(KINDS, NAMES, strict=True)):
        box(root, 64 + 150 * n, 140 * len(SHOWN) + 16, 12, 12, KINDS[kind][0])
        text(root, 82 + 150 * n, 140 * len(SHOWN) + 27, name)
    return finished(root)


def memory() -> str:
    """Draw each rank's peak activations, in micro-batches of all layers of a rank."""
    names = [name for name in SCHEDULES if name != "forward_only"]
    root = canvas(720, 40 + 34 * len(names) + 24)
    text(
        root,
        24,
        26,
        "activations kept at the peak, in micro-batches of all layers of a rank: ranks 0 to 3",
    )
    kept = {name: peaks(name) for name in names}
    scale = 520 / max(map(max, kept.values()))
    for row, name in enumerate(names):
        top = 42 + row * 34
        text(root, 24, top + 18, name)
        for rank, amount in enumerate(kept[name]):
            box(root, 160, top + rank * 7, amount * scale, 6, COLOURS[rank])
        text(root, 168 + max(kept[name]) * scale, top + 18, f"{max(kept[name]):g}")
    return finished(root)


def peaks(name: str) -> list[float]:
    """Return each rank's peak, with a rank's layers together as one."""
    schedule = SCHEDULES[name](RANKS, MICRO_BATCHES)
    chunks = schedule.num_stages / schedule.num_ranks
    return [live / chunks for live in check(schedule).peak_live]


PICTURES = {"grid": grid, "masks": masks, "schedules": schedules, "memory": memory}


def draw_all() -> Iterable[tuple[Path, str]]:
    """Yield each file and its content."""
    for name, picture in PICTURES.items():
        yield FOLDER / f"{name}.svg", picture()


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, content in draw_all():
        file.write_text(content, encoding="utf-8")
        print(file.relative_to(ROOT))
