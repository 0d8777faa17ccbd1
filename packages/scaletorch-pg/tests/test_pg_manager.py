"""The manager on real ranks: attributes, groups, life cycle, and layouts that do not fit."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as torch_dist

from scaletorch.dist import InvalidArgumentError, MismatchError, ScaletorchError, StateError
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.pg_manager import (
    Grid,
    ProcessGroupManager,
    destroy_process_group_manager,
    get_process_group_manager,
    groups,
    setup_process_group_manager,
)

LAYOUTS = [
    (2, {"pp_size": 2}),
    (4, {"tp_size": 2, "pp_size": 2}),
    (4, {"dp_size": 4}),
    (8, {"cp_size": 2, "pp_size": 2, "dp_size": 2}),
    (8, {"tp_size": 2, "pp_size": 2, "dp_size": 2, "ep_size": 2}),
    (8, {"tp_size": 2, "pp_size": 2, "dp_size": 2, "ep_size": 2, "etp_size": 2}),
    (8, {"tp_size": 2, "cp_size": 2, "dp_size": 2, "ep_size": 8}),
    (8, {"tp_size": 2, "dp_size": 4, "etp_size": 1}),
    (6, {"cp_size": 3, "dp_size": 2, "ep_size": 2}),
]


def grid_of(sizes):
    return Grid(**{name.removesuffix("_size"): size for name, size in sizes.items()})


def members_by_communication(group):
    """Global ranks of a group, learnt through the group itself."""
    found = [torch.zeros(1, dtype=torch.long) for _ in range(torch_dist.get_world_size(group))]
    torch_dist.all_gather(found, torch.tensor([torch_dist.get_rank()]), group=group)
    return [int(rank) for rank in found]


def attributes_of_a_rank(sizes):
    manager = setup_process_group_manager(**sizes)
    found = {}
    for axis in groups.AXES:
        group = getattr(manager, f"{axis}_group")
        assert manager.group(axis) is group
        assert group.rank() == getattr(manager, f"{axis}_rank")
        assert members_by_communication(group) == getattr(manager, f"{axis}_group_ids")
        assert getattr(manager, f"{axis}_size") == torch_dist.get_world_size(group)
        if axis != "world":
            assert getattr(manager, f"{axis}_world_size") == torch_dist.get_world_size(group)
        found[axis] = getattr(manager, f"{axis}_group_ids")
        ends = (getattr(manager, f"{axis}_first_rank"), getattr(manager, f"{axis}_last_rank"))
        assert ends == (found[axis][0], found[axis][-1])
    assert manager.world_group is torch_dist.group.WORLD
    rank = torch_dist.get_rank()
    place = manager.grid.coordinates(rank)
    assert place == (manager.dp_rank, manager.pp_rank, manager.cp_rank, manager.tp_rank)
    among_experts = manager.grid.expert_coordinates(rank)
    assert among_experts == (manager.edp_rank, manager.ep_rank, manager.etp_rank)
    assert (manager.global_rank, manager.local_rank) == (rank, rank)
    assert manager.world_size == torch_dist.get_world_size()
    assert (manager.cp_send_rank, manager.cp_recv_rank) == manager.grid.ring_neighbours("cp", rank)
    assert (manager.pp_prev_rank, manager.pp_next_rank) == manager.grid.pipeline_neighbours(rank)
    assert manager.pp_is_first_stage == (place.pp == 0)
    assert manager.pp_is_last_stage == (place.pp == manager.pp_size - 1)
    assert manager.grid == grid_of(sizes)
    destroy_process_group_manager()
    return found


@pytest.mark.parametrize(("world_size", "sizes"), LAYOUTS)
def test_attributes_and_groups_are_those_of_the_grid(world_size, sizes):
    grid = grid_of(sizes)
    for rank, found in enumerate(run_ranks(attributes_of_a_rank, world_size, sizes)):
        assert found == {axis: list(grid.group(axis, rank)) for axis in groups.AXES}


def test_one_plain_process():
    manager = ProcessGroupManager()
    assert manager.grid == Grid()
    assert str(manager) == "TP(1)-CP(1)-PP(1)-DP(1)-Rank(0)"
    assert repr(manager) == "ProcessGroupManager(TP(1)-CP(1)-PP(1)-DP(1)-Rank(0))"
    for axis in groups.AXES:
        assert manager.group(axis) is None
        assert getattr(manager, f"{axis}_group_ids") == [0]
        assert getattr(manager, f"{axis}_size") == 1
    assert (manager.cp_send_rank, manager.cp_recv_rank) == (0, 0)
    assert (manager.pp_prev_rank, manager.pp_next_rank) == (None, None)
    assert manager.pp_is_first_stage
    assert manager.pp_is_last_stage
    manager.destroy()
    manager.destroy()


def test_one_process_may_destroy_its_manager_and_set_up_another():
    manager = setup_process_group_manager()
    manager.destroy()
    assert get_process_group_manager() is None
    with pytest.raises(StateError, match="is gone"):
        manager.group("tp")
    setup_process_group_manager()
    destroy_process_group_manager()


def info_of_a_rank(ep_size):
    manager = setup_process_group_manager(tp_size=2, pp_size=2, ep_size=ep_size)
    info = manager.get_info()
    text = str(manager)
    destroy_process_group_manager()
    return info, text


@pytest.mark.parametrize(
    ("ep", "layout", "place", "groups"),
    [
        (1, "TP(2)-CP(1)-PP(2)-DP(1)", (0, 0, 1), ([3], [3], [2, 3])),
        (2, "TP(2)-CP(1)-PP(2)-DP(1)-EP(2)", (0, 1, 0), ([3], [2, 3], [3])),
    ],
)
def test_info_is_plain_data_and_str_is_short(ep, layout, place, groups):
    info, text = run_ranks(info_of_a_rank, 4, ep)[3]
    experts = ("edp", "ep", "etp")
    assert text == f"{layout}-Rank(3)"
    assert info["layout"] == layout
    assert json.loads(json.dumps(info)) == info
    assert info["coordinates"] == {"dp": 0, "pp": 1, "cp": 0, "tp": 1}
    assert info["groups"]["pp"] == [1, 3]
    assert (info["pp_prev_rank"], info["pp_next_rank"]) == (1, None)
    assert info["expert_coordinates"] == dict(zip(experts, place, strict=True))
    assert tuple(info["groups"][axis] for axis in experts) == groups


def one_rank_with_a_group():
    manager = setup_process_group_manager()
    same = [manager.group(axis) is torch_dist.group.WORLD for axis in groups.AXES]
    destroy_process_group_manager()
    return all(same), torch_dist.is_initialized()


def test_a_world_of_one_rank_uses_world_for_everything():
    assert run_ranks(one_rank_with_a_group, 1) == [(True, True)]


def life_cycle():
    world = torch_dist.group.WORLD
    count = len(torch_dist.distributed_c10d._world.pg_names)
    destroy_process_group_manager()  # there is none
    assert get_process_group_manager() is None
    manager = setup_process_group_manager(tp_size=2, dp_size=2)
    assert get_process_group_manager() is manager
    with pytest.raises(StateError) as caught:
        setup_process_group_manager(tp_size=2, dp_size=2)
    assert get_process_group_manager() is manager
    destroy_process_group_manager()
    destroy_process_group_manager()
    assert get_process_group_manager() is None
    assert len(torch_dist.distributed_c10d._world.pg_names) == count
    assert torch_dist.group.WORLD is world
    for late in (lambda: manager.group("tp"), lambda: manager.tp_group):
        with pytest.raises(StateError, match=r"the tp group of TP.2.*is gone.*was destroyed"):
            late()
    assert manager.tp_group_ids
    again = setup_process_group_manager(cp_size=2, pp_size=2)
    total = torch.ones(1)
    torch_dist.all_reduce(total, group=again.cp_group)
    destroy_process_group_manager()
    return str(caught.value), total.item()


def test_setup_get_destroy_and_setup_again_with_another_layout():
    for rank, (message, total) in enumerate(run_ranks(life_cycle, 4)):
        assert message == (
            "a process group manager is set up already "
            f"(TP(2)-CP(1)-PP(1)-DP(2)-Rank({rank})); call destroy_process_group_manager() "
            "before another setup_process_group_manager()"
        )
        assert total == 2


def manager_outlives_its_world(folder):
    manager = setup_process_group_manager(dp_size=2)
    rank = torch_dist.get_rank()
    torch_dist.destroy_process_group()
    gone = get_process_group_manager()
    with pytest.raises(StateError, match="its default group was destroyed"):
        manager.dp_group  # noqa: B018
    torch_dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    after = setup_process_group_manager(tp_size=2)
    manager.destroy()  # its groups went with the old world: nothing to do
    assert get_process_group_manager() is after
    destroy_process_group_manager()
    return gone


def test_a_manager_ends_with_the_default_group(tmp_path):
    assert run_ranks(manager_outlives_its_world, 2, str(tmp_path)) == [None, None]


def wrong_product(sizes):
    with pytest.raises(InvalidArgumentError) as caught:
        setup_process_group_manager(**sizes)
    assert get_process_group_manager() is None
    return str(caught.value), len(torch_dist.distributed_c10d._world.pg_names)


def test_wrong_product_shows_real_numbers():
    sizes = {"tp_size": 2, "cp_size": 1, "pp_size": 3, "dp_size": 2}
    for message, count in run_ranks(wrong_product, 4, sizes):
        assert message == (
            "the layout needs tp * cp * pp * dp = 2 * 1 * 3 * 2 = 12 ranks, but the world has "
            "4: choose sizes whose product is 4"
        )
        assert count == 1  # WORLD alone


def own_layout(layouts):
    rank = torch_dist.get_rank()
    with pytest.raises(ScaletorchError) as caught:
        setup_process_group_manager(**layouts.get(rank, layouts["others"]))
    made = len(torch_dist.distributed_c10d._world.pg_names) - 1
    return type(caught.value), str(caught.value), made


PLAIN = "TP(1)-CP(1)-PP(1)-DP(4)"
EXPERTS = {"tp_size": 2, "dp_size": 2, "ep_size": 2}
ODD = [  # the layouts of most and of odd ranks, the ranks that raise their own error, and its text
    (
        {"others": {"dp_size": 4}, 2: {"tp_size": 2, "pp_size": 2}},
        (),
        "the ranks disagree on the layout: rank 2 differs from ranks 0, 1, 3; every rank must "
        "be given the same (this is rank {})\n"
        f"rank 2 (+), ranks 0, 1, 3 (-):\n  - {PLAIN}\n  + TP(2)-CP(1)-PP(2)-DP(1)",
    ),
    (
        {"others": {"dp_size": 4}, 1: {"tp_size": 4}, 2: {"cp_size": 4}},
        (),
        f"rank 2 (+), ranks 0, 3 (-):\n  - {PLAIN}\n  + TP(1)-CP(4)-PP(1)-DP(1)",
    ),
    (
        {"others": EXPERTS, 0: {**EXPERTS, "etp_size": 2}},
        (),
        "rank 0 (+), ranks 1-3 (-):\n  - TP(2)-CP(1)-PP(1)-DP(2)-EP(2)\n  + TP(2)-CP(1)-PP(1)-"
        "DP(2)-EP(2)-ETP(2)",
    ),
    (
        {"others": {"dp_size": 4}, 3: {"dp_size": "4"}},
        (3,),
        "dp size must be a positive int, got '4'",
    ),
    (
        {"others": {"dp_size": 4, "ep_size": 3}},
        (0, 1, 2, 3),
        "ep * etp = 3 * 1 must divide the ranks of a stage",
    ),
]


@pytest.mark.parametrize(("layouts", "own", "said"), ODD)
def test_layouts_that_differ_or_are_none_are_refused_on_every_rank(layouts, own, said):
    for rank, (kind, message, made) in enumerate(run_ranks(own_layout, 4, layouts, timeout=30)):
        assert kind is (InvalidArgumentError if rank in own else MismatchError)
        assert said.format(rank) in message
        if own and rank not in own:
            assert message.startswith(f"rank {own[0]} cannot take part in the layout: ")
        assert made == 0


def test_axis_without_a_group():
    manager = ProcessGroupManager()
    assert manager.group("dp_cp") is manager.cp_dp_group
    assert manager.group("all") is manager.world_group
    with pytest.raises(InvalidArgumentError) as caught:
        manager.group("tp_cp")
    assert str(caught.value) == (
        "axis 'tp_cp' has no process group: expected one of tp, cp, pp, dp, cp_dp, pp_dp, "
        "ep, edp, etp, world"
    )
    with pytest.raises(AttributeError, match="'ProcessGroupManager' object has no attribute 'xp_"):
        manager.xp_group  # noqa: B018
