"""Recording within the `Trainer` of transformers."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from .tape import record


def trainer_callback(folder: str | Path) -> Any:
    """Return a callback that records the first step of a `transformers.Trainer`.

    That is all micro-batches of its first update, on each rank.

    Args:
        folder: One for all ranks of a run; made if it is missing.

    Example:
        >>> trainer.add_callback(trainer_callback("runs/one"))
    """
    from transformers import TrainerCallback

    class Records(TrainerCallback):  # type: ignore[misc]
        """Records from the start of the first step until its update."""

        stack: ExitStack | None = None

        def on_step_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            if self.stack is None:
                self.stack = ExitStack()
                self.stack.enter_context(record(folder, model))

        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            if self.stack is not None:
                self.stack.close()

    return Records()
