"""The attributes of a manager for each axis, declared for editors and type checkers."""

from __future__ import annotations

from torch.distributed import ProcessGroup


class AxisAttributes:
    """Attributes of each axis, which `ProcessGroupManager` describes."""

    tp_group: ProcessGroup | None
    tp_size: int
    tp_world_size: int
    tp_rank: int
    tp_first_rank: int
    tp_last_rank: int
    tp_group_ids: list[int]

    cp_group: ProcessGroup | None
    cp_size: int
    cp_world_size: int
    cp_rank: int
    cp_first_rank: int
    cp_last_rank: int
    cp_group_ids: list[int]

    pp_group: ProcessGroup | None
    pp_size: int
    pp_world_size: int
    pp_rank: int
    pp_first_rank: int
    pp_last_rank: int
    pp_group_ids: list[int]

    dp_group: ProcessGroup | None
    dp_size: int
    dp_world_size: int
    dp_rank: int
    dp_first_rank: int
    dp_last_rank: int
    dp_group_ids: list[int]

    cp_dp_group: ProcessGroup | None
    cp_dp_size: int
    cp_dp_world_size: int
    cp_dp_rank: int
    cp_dp_first_rank: int
    cp_dp_last_rank: int
    cp_dp_group_ids: list[int]

    pp_dp_group: ProcessGroup | None
    pp_dp_size: int
    pp_dp_world_size: int
    pp_dp_rank: int
    pp_dp_first_rank: int
    pp_dp_last_rank: int
    pp_dp_group_ids: list[int]

    ep_group: ProcessGroup | None
    ep_size: int
    ep_world_size: int
    ep_rank: int
    ep_first_rank: int
    ep_last_rank: int
    ep_group_ids: list[int]

    edp_group: ProcessGroup | None
    edp_size: int
    edp_world_size: int
    edp_rank: int
    edp_first_rank: int
    edp_last_rank: int
    edp_group_ids: list[int]

    etp_group: ProcessGroup | None
    etp_size: int
    etp_world_size: int
    etp_rank: int
    etp_first_rank: int
    etp_last_rank: int
    etp_group_ids: list[int]

    world_group: ProcessGroup | None
    world_size: int
    world_rank: int
    world_first_rank: int
    world_last_rank: int
    world_group_ids: list[int]
