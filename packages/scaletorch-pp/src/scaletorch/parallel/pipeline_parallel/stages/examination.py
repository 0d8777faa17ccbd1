"""The first forward of a kind, examined: run as it is written, and its failures explained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import DistError

from ....dist.errors import InvalidArgumentError, ScaletorchError
from ...pg_manager import describe_rank
from ...pg_manager.building import eagerly
from .beside import Following
from .passage import Passage


@contextmanager
def examining(passage: Passage) -> Iterator[None]:
    """Run the forward in this context uncompiled, and tell why the model's own code may fail.

    Raises:
        InvalidArgumentError: It fails, which may be because this stage lacks modules.
    """
    with eagerly(), Following(passage):
        try:
            yield
        except (ScaletorchError, DistError):
            raise
        except Exception as error:
            if passage.inside:  # a layer's own failure
                raise
            raise InvalidArgumentError(_failed(error)) from error


def _failed(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return (
        f"{describe_rank()}: the model's own code between its layers fails where modules are "
        f"another stage's, which return tensors of a form and without values: it raised "
        f"{type(error).__name__} ({text}). If it runs in one process, it takes something else of "
        "them than such tensors of the form that they are given, or that layers of this stage "
        "return: compute that inside the layers, make it an entry of the micro-batch, or use no "
        "pipeline (pp_size=1)"
    )
