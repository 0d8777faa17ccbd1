"""Train every causal family under transformers' own tensor parallelism, and compare."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from ..names import names
from .run import families


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="NAME")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    began, kept = time.monotonic(), {}
    for name, found in families(given.families or names()):
        kept[name] = found.plain()
        apart = " ".join(f"{k} {e:.0e} {w}" for k, (e, w) in found.apart.items() if e > 1e-9)
        words = [found.word, found.words] if found.word else [
            part for d, j in found.by_dtype.items() for part in (d, j.word, j.words, j.born if j.word=="wrong" else "", *j.how)]
        print(f"{name:24} {found.cut:.0%} {time.monotonic()-began:.0f}s {apart} | {' '.join(words)}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(kept, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
