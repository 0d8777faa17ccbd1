"""A mutant: a fault, where it is put, and the layout that must show it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from scaletorch.verify import parse_layout
from scaletorch.verify.cases import Case

from .patch import Mutate, instead, patched

Fault = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault."""

    name: str
    fault: str  # one line that says what is wrong in the library
    targets: tuple[str, ...]  # what is replaced; see `patch.patched`
    mutate: Mutate  # makes the replacement out of each target's original
    case: Case  # where the fault must show
    # Where a person who hunts the fault must be led, see `locating.matches`; "" if the proof names
    # it, and nobody else can: draws of dropout.
    born: str
    model: str  # a key of `hunt.MODELS`

    def apply(self) -> ExitStack:
        """Put the fault in; leaving the stack takes it out."""
        stack = ExitStack()
        for target in self.targets:
            stack.enter_context(patched(target, self.mutate))
        return stack


@dataclass(slots=True)
class Catalogue:
    """The faults of one package, written one after another as functions."""

    package: str  # below the library's root; targets are relative to it
    layout: str  # of faults that name no other
    mutants: list[Mutant] = field(default_factory=list)

    def fault(
        self, *targets: str, born: str = "", layout: str = "", model: str = "", **options: Any
    ) -> Callable[[Fault], Fault]:
        """Enter the decorated function, which runs `instead` of each target.

        Its name and docstring are the mutant's.
        """
        absolute = tuple(f"{self.package}.{target}" for target in targets)
        case = Case(parse_layout(layout or self.layout), **options)
        model = model or ("staged" if case.grid.pp > 1 else "specimen")

        def enter(faulty: Fault) -> Fault:
            name, text = faulty.__name__.replace("_", "-"), (faulty.__doc__ or "").strip()
            mutate = instead(faulty)
            self.mutants.append(Mutant(name, text, absolute, mutate, case, born, model))
            return faulty

        return enter
