"""A manager under the names that DeepSpeed and Megatron-style code ask."""

import pytest

from scaletorch.dist import InvalidArgumentError, StateError, group_ranks
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    as_mpu,
    destroy_process_group_manager,
    setup_process_group_manager,
)

AXES = {"tensor_model": "tp", "model": "tp", "sequence": "cp", "data": "dp"}
AXES |= {"sequence_data": "cp_dp", "pipeline_model": "pp"}
AXES |= {"expert_model": "ep", "expert_tensor": "etp", "expert_data": "edp"}


def ask(sizes):
    manager = setup_process_group_manager(**sizes)
    mpu = as_mpu()
    for name, axis in AXES.items():
        group = getattr(mpu, f"get_{name}_parallel_group")()
        assert group is manager.group(axis)
        ranks = getattr(mpu, f"get_{name}_parallel_group_ranks")()
        assert tuple(ranks) == group_ranks(group)
        assert getattr(mpu, f"get_{name}_parallel_world_size")() == len(ranks)
        assert ranks[getattr(mpu, f"get_{name}_parallel_rank")()] == manager.global_rank
        assert getattr(mpu, f"get_{name}_parallel_src_rank")() == ranks[0]
    destroy_process_group_manager()
    for late in (mpu.get_data_parallel_group, mpu.get_expert_model_parallel_group):
        with pytest.raises(StateError, match="is gone"):
            late()


@pytest.mark.parametrize(
    "sizes",
    [
        {"tp_size": 2, "dp_size": 2},
        {"cp_size": 2, "dp_size": 2},
        {"tp_size": 2, "dp_size": 2, "ep_size": 2},
        {"tp_size": 2, "dp_size": 2, "ep_size": 2, "etp_size": 2},
    ],
)
def test_every_axis_answers_by_these_names(sizes):
    run_ranks(ask, 4, sizes)


def refused():
    with pytest.raises(StateError, match="there are none: call init_dist"):
        as_mpu()
    manager = setup_process_group_manager(pp_size=2)
    with pytest.raises(InvalidArgumentError, match=r"no pipeline .* TP\(1\)-CP\(1\)-PP\(2\)"):
        as_mpu(manager)
    destroy_process_group_manager()


def test_without_a_manager_and_with_a_pipeline_it_is_refused():
    run_ranks(refused, 2)


def test_one_process_has_no_groups_to_give():
    manager = setup_process_group_manager()
    with pytest.raises(StateError, match="call init_dist"):
        as_mpu(manager)
    destroy_process_group_manager()
