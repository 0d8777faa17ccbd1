"""Checks that ranks make one after another, so that they are started once for all of them."""

from functools import partial

import torch


def in_turn_of(module):
    """Return a function that calls checks in turn, and says which one failed.

    It is one of a test's own module: ranks find it there, and what it is given.
    """

    def in_turn(checks):
        for check in checks:
            torch.manual_seed(0)  # on every rank the same, whatever the one before has drawn
            try:
                check()
            except BaseException as error:
                error.add_note(f"in {check}")
                raise

    in_turn.__module__, in_turn.__qualname__ = module, "in_turn"
    return in_turn


def for_each(check, cases):
    """Return a check for each case."""
    return [partial(check, *case) for case in cases]
