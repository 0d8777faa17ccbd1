"""Checks that ranks make one after another, so that they are started once, and one of gradients."""

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


def assert_same_gradients(model, plain, tolerance=1e-12):
    """Compare gradients; None is torch's own tolerance."""
    for (name, found), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        if expected.grad is None:
            assert found.grad is None, name
        else:
            limits = {"rtol": tolerance, "atol": tolerance}
            torch.testing.assert_close(found.grad, expected.grad, **limits, msg=name)
