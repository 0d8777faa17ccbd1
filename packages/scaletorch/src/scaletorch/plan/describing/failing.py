"""What a model's own code cannot do while it is described: said in words, with its place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

from ...dist.errors import InvalidArgumentError, ScaletorchError
from ..description import Cut

_OURS = ("torch", "scaletorch", "contextlib")


@contextmanager
def own_code(cut: Cut) -> Iterator[None]:
    """Turn an error of the model's own code into one that says which, where and what to do.

    Args:
        cut: In which the model runs; `Cut()` is whole.

    Raises:
        InvalidArgumentError: Of any error that is none of this library's.
    """
    try:
        yield
    except ScaletorchError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}{_place(error)}"
        if cut == Cut():
            raise InvalidArgumentError(
                f"the model cannot run on the batch: {what}; a model that takes something else "
                "than input_ids and labels needs a batch of its own (--batch)"
            ) from error
        sizes = [
            f"{axis} {size}" for axis in ("tp", "cp", "ep") if (size := getattr(cut, axis)) > 1
        ]
        raise InvalidArgumentError(f"with {', '.join(sizes)} its code fails: {what}") from error


def _place(error: Exception) -> str:
    """Return the last line of the model's that the error came through."""
    frames = [
        (frame.f_code.co_filename, line)
        for frame, line in walk_tb(error.__traceback__)
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _OURS
    ]
    entered = frames[1:] if frames and frames[0][0].endswith("runpy>") else frames
    return f" ({Path(entered[-1][0]).name}:{entered[-1][1]})" if entered else ""
