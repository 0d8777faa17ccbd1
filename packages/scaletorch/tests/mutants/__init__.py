"""Faults that a verification must find: each is put into the running library, one at a time."""

from .hunt import MUTANTS, Outcome, hunt, to_markdown
from .locating import matches
from .mutant import Mutant

__all__ = ["MUTANTS", "Mutant", "Outcome", "hunt", "matches", "to_markdown"]
