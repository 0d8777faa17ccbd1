"""`python -m scaletorch.dist.devices` prints the table of backends for this machine."""

from __future__ import annotations

import argparse

from .report import backend_table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog=f"python -m {__package__}", description=main.__doc__)
    parser.parse_args()
    print(backend_table())


if __name__ == "__main__":
    main()
