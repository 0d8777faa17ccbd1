"""The proof as an assertion, for the tests of other projects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..compose.entries import RowDims
from ..compose.naming import parse_layout
from ..compose.own_loss import LossFunction
from ..dist.errors import InvalidArgumentError
from ..parallel.pg_manager import Grid
from ..parallel.pipeline_parallel import Split
from .problem import Batch, BatchFn, ModelFn
from .report import Report
from .verify import verify
from .where import name_of, named

Layout = str | Grid


def assert_trains_alike(
    model: ModelFn,
    batch: Batch | BatchFn,
    layouts: Layout | Iterable[Layout],
    *,
    dtype: str | Sequence[str] = "float64",
    options: Mapping[str, Sequence[str | int]] | None = None,
    plan: Mapping[str, Any] | None = None,
    split: Split | None = None,
    row_dims: RowDims | None = None, sequence_dims: RowDims | None = None,
    loss_fn: LossFunction | None = None,
    optimizer: Callable[..., Optimizer] | None = None,
    optimizer_args: Mapping[str, Any] | None = None,
    timeout: float = 120.0, device: str | None = None, backend: str | None = None,
) -> Report:  # fmt: skip
    """Assert that a plain model trains on these layouts as in one process; see `verify`.

    Args:
        model: Module-level function, or class without arguments, that makes the plain module.
        batch: The global batch of every step, or a function of the step that returns it; see
            `verify`. Each dp rank needs at least two rows, one for each micro-batch.
        layouts: Such as "dp2", "dp2-tp2", "1x1x1x2" (DPxPPxCPxTP), a `Grid`, or several of them.
        dtype: 'float64', 'float32', 'bfloat16', or several of them.
        options: Values of `OPTIONS` to try, such as `{"schedule": ["1f1b", "zb_h1"]}`.
        plan: As for `parallelize`; None recognises the model's family.
        split: Pipeline split; None infers it from the module.
        row_dims: As for `shard_global_batch`.
        sequence_dims: As for `shard_global_batch`.
        loss_fn: As for `verify`.
        optimizer: Module-level class or function of parameters; None is SGD, then AdamW.
        optimizer_args: Its arguments besides the parameters.
        timeout: Seconds for one layout.
        device: As for `verify`: None is this machine's accelerator, or the CPU if it has none.
        backend: As for `verify`.

    Returns:
        The report.

    Raises:
        AssertionError: A layout trains differently, fails or is refused; the text is the report.

    Example:
        >>> def test_my_model():
        ...     assert_trains_alike(MyModel, my_batch, ["dp2", "tp2", "dp2-tp2"])
    """
    __tracebackhide__ = True  # pytest leaves this frame out: the report says everything
    _require_maker(model)
    report = verify(
        model,
        batch if callable(batch) else lambda step: batch,
        layouts=_grids(layouts), dtype=dtype, options=options, plan=plan, split=split,
        row_dims=row_dims, sequence_dims=sequence_dims, loss_fn=loss_fn, optimizer=optimizer,
        optimizer_args=optimizer_args, timeout=timeout, device=device, backend=backend,
    )  # fmt: skip
    if report.passed:
        return report
    things = {"model": model, "batch": batch, "plan": plan, "loss": loss_fn, "optimizer": optimizer}
    told = {"optimizer-args": optimizer_args, "row-dims": row_dims, "sequence-dims": sequence_dims}
    command = report.command + named(things, told)
    raise AssertionError(f"{name_of(model)}\n{replace(report, command=command)}")


def _require_maker(model: ModelFn) -> None:
    if isinstance(model, nn.Module):
        raise InvalidArgumentError(
            f"assert_trains_alike needs what makes the model, not a {type(model).__name__} that is "
            "made: every rank makes its own, so give the class, or a function at module level"
        )


def _grids(layouts: Layout | Iterable[Layout]) -> list[Grid]:
    named = [layouts] if isinstance(layouts, str | Grid) else list(layouts)
    if not named:
        raise InvalidArgumentError("assert_trains_alike needs a layout, such as 'dp2' or 'dp2-tp2'")
    return [parse_layout(each) if isinstance(each, str) else each for each in named]
