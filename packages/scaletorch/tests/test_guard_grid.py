"""The guard names ranks and groups of a grid."""

import torch

from scaletorch import guard
from scaletorch.dist import RankFaultError, all_reduce, launch
from scaletorch.parallel.pg_manager import describe_rank, setup_process_group_manager


def fail_among_experts():
    manager = setup_process_group_manager(dp_size=4, ep_size=2)
    try:
        with guard.watch(label=describe_rank):
            if manager.global_rank == 3:
                raise ValueError("no such expert")
            all_reduce(torch.ones(1), group=manager.ep_group if manager.global_rank == 2 else None)
    except (RankFaultError, ValueError) as error:
        return str(error)
    return "went on"


def test_the_guard_names_experts_and_their_groups():
    # Fresh ranks: after a fault their groups are broken.
    said = launch(fail_among_experts, 4, timeout=200)
    assert said[3] == "no such expert"
    for message in said[:3]:
        assert "rank 3 (dp3 pp0 cp0 tp0 edp1 ep1 etp0) raised ValueError: no such expert" in message
    assert "in ep" in said[0]
    assert "rank 2 (dp2 pp0 cp0 tp0 edp1 ep0 etp0)" in said[0]
