"""A manager with the method names of DeepSpeed and Megatron-style code."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from ...dist.errors import InvalidArgumentError, StateError
from .manager import ProcessGroupManager, get_process_group_manager

# Megatron-style name -> axis.
NAMES = {
    "tensor_model": "tp",
    "model": "tp",
    "sequence": "cp",
    "pipeline_model": "pp",
    "data": "dp",
    "sequence_data": "cp_dp",
    "expert_model": "ep",
    "expert_tensor": "etp",
    "expert_data": "edp",
}


def as_mpu(manager: ProcessGroupManager | None = None) -> SimpleNamespace:
    """Return a "model parallel unit" for `deepspeed.initialize(mpu=...)`.

    For each of `tensor_model`, `model` (both tp), `sequence` (cp), `pipeline_model` (pp),
    `data` (dp), `sequence_data` (cp x dp), `expert_model` (ep), `expert_tensor` (etp) and
    `expert_data` (edp) it has

    - `get_<name>_parallel_group()`, the process group,
    - `get_<name>_parallel_world_size()`, its number of ranks,
    - `get_<name>_parallel_rank()`, this rank's index in it,
    - `get_<name>_parallel_src_rank()`, the global rank of its first member,
    - `get_<name>_parallel_group_ranks()`, the global ranks of all.

    Args:
        manager: The manager; None means the current one.

    Raises:
        StateError: There is no manager, or it has no process groups.
        InvalidArgumentError: The grid has pipeline stages: "model" would mean tp x pp, which has
            no group, and DeepSpeed's engine runs only its own pipelines.

    Example:
        >>> engine, *_ = deepspeed.initialize(model=model, config=config, mpu=as_mpu())
    """
    manager = manager or get_process_group_manager()
    if manager is None or manager.world_group is None:
        raise StateError(
            "an mpu gives away the groups of a process group manager, and there are none: call "
            "init_dist() and setup_process_group_manager(...) first"
        )
    if manager.pp_size > 1:
        raise InvalidArgumentError(
            f"an mpu has no pipeline of several stages, and the layout is {manager.grid}: take "
            "pp_size=1, or train with scaletorch's own pipeline instead of DeepSpeed's engine"
        )
    calls = {}
    for name, axis in NAMES.items():
        answers = {
            "group": partial(manager.group, axis),
            "world_size": partial(getattr, manager, f"{axis}_size"),
            "rank": partial(getattr, manager, f"{axis}_rank"),
            "src_rank": partial(getattr, manager, f"{axis}_first_rank"),
            "group_ranks": partial(getattr, manager, f"{axis}_group_ids"),
        }
        calls.update({f"get_{name}_parallel_{what}": answers[what] for what in answers})
    return SimpleNamespace(**calls)
