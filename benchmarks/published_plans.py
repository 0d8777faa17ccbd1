"""Errors of `scaletorch.plan` on published runs, in time and memory.

Nothing runs: layouts, models and measurements are data (`benchmarks.known`), models are described
in closed form, and at most three constants of each machine were fitted, on other runs than the ones
shown. `--fitted` shows the fitted runs, `--fit` fits the constants again, in half a minute, and
`--write` writes the tables into docs/plan_published.md, in both languages.

    python -m benchmarks.published_plans
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from .known.machines import GIB, MACHINES
from .known.predicted import fitted
from .known.rows import SOURCES, rows
from .known.tables import HEAD, RULE, compared, constants, lines, summary

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGES = [DOCS / "plan_published.md", DOCS / "zh" / "plan_published.md"]
TABLE = re.compile(r"(<!-- (\w+) -->\n\n)(?:\|.*\n)+")
CHINESE = {
    "model": "模型", "heads": "头数", "ranks": "rank 数", "rows": "行数", "step, s": "步 (s)",
    "planned": "计划值", "error": "误差", "machine": "机器", "table": "表",
    "between nodes, GB/s": "节点之间 (GB/s)", "products": "矩阵乘", "time, mean": "时间平均误差",
    "memory, mean": "内存平均误差", "largest": "最大",
}  # fmt: skip


def tables(fit: bool = False) -> dict[str, list[str]]:
    """Return the lines of all tables by name: of the shown runs, or of those fitted on."""
    found = compared(row for row in rows() if row.fit == fit)
    runs = {name: [each for each in found if each.row.table == name] for name in SOURCES}
    runs = {name: shown for name, shown in runs.items() if shown}
    each = {name: [HEAD, RULE, *lines(shown)] for name, shown in runs.items()}
    return {"constants": list(constants()), **each, "summary": list(summary(runs))}


def written(page: str, *, chinese: bool = False) -> str:
    """Return a page with new tables."""
    known = tables()

    def table(match: re.Match[str]) -> str:
        head, *rest = known[match[2]]
        if chinese:
            names = (name.strip() for name in head.strip("|").split("|"))
            head = f"| {' | '.join(CHINESE.get(name, name) for name in names)} |"
        return match[1] + "".join(f"{line}\n" for line in (head, *rest))

    return TABLE.sub(table, page)


def fit_again() -> None:
    """Print the constants fitted again, and whether they equal those in use."""
    for machine in sorted({row.machine for row in rows() if row.fit}):
        own, again = MACHINES[machine].constants, fitted(machine, rows())
        print(
            f"{machine}: products {again.products:.2f}, {again.overhead * 1e6:.0f} µs, "
            f"{again.reserved / GIB:.1f} GiB{'' if own == again else ' - CHANGED'}"
        )


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fitted", action="store_true", help="show the runs that were fitted on")
    parser.add_argument("--fit", action="store_true", help="fit the constants again")
    parser.add_argument("--write", action="store_true", help="write the tables of the page")
    given = parser.parse_args()
    if given.fit:
        fit_again()
    elif given.write:
        for page in PAGES:
            page.write_text(written(page.read_text(), chinese=page.parent.name == "zh"))
    else:
        for name, table in tables(given.fitted).items():
            print(f"\n{name}: {SOURCES[name]}\n" if name in SOURCES else f"\n{name}\n")
            print(*table, sep="\n")


if __name__ == "__main__":
    main()
