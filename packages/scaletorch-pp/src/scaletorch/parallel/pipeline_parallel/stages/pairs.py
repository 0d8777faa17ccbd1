"""What lets a pipeline run the pairs of its schedule together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from .stage import PipelineParallel


def run_pairs(
    stage: PipelineParallel,
    switching: Callable[[Callable[[], None]], AbstractContextManager[object]],
) -> None:
    """Let the two actions of a pair run together from now on; all ranks of the stages call it.

    Args:
        stage: The rank's stages.
        switching: Returns a context in which modules of the stages call its argument before they
            wait for other ranks of the stage, at the same places on all of these: what they wait
            for has begun, and passes while the other action computes.
    """
    stage.runtime.switching = switching
