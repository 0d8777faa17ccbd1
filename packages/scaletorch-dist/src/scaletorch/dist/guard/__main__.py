"""``python -m scaletorch.dist.guard report FOLDER``: what the ranks of a job did last."""

from __future__ import annotations

import argparse
import sys

from .merge import report_folder


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}")
    commands = parser.add_subparsers(required=True)
    report = commands.add_parser("report", help="merge the ledgers in a folder")
    report.add_argument("folder")
    report.add_argument("--last", type=int, default=8, help="calls of each group to show")
    options = parser.parse_args(arguments)
    try:
        text = report_folder(options.folder, options.last)
    except FileNotFoundError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
