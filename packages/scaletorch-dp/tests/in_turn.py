"""Checks that ranks make one after another, so that they are started once for all of them."""

from functools import partial

import torch


def in_turn(checks):
    """Call checks in turn; an error says in which it was raised."""
    for check in checks:
        torch.manual_seed(0)  # on every rank the same, whatever the one before has drawn
        try:
            check()
        except BaseException as error:
            error.add_note(f"in {check}")
            raise


def for_each(check, cases):
    """Return a check for each case."""
    return [partial(check, *case) for case in cases]
