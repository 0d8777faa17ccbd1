"""A checkpoint saved on any layout is the same state on any other, and training goes on from it."""

import functools
import itertools

import pytest
import torch
from sweeps import today

from scaletorch.checkpoint import load, save
from scaletorch.compose import full_state_dict, parallelize, shard_global_batch, train_step
from scaletorch.compose.state import gather_full
from scaletorch.dist import RankPool, all_reduce, get_rank, is_main_process
from scaletorch.dist.testing import preload
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.data_parallel import parameter_shards, shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    get_process_group_manager,
    setup_process_group_manager,
)

BATCH, LENGTH, STEPS = 8, 16, 2
BOUND = 1e-12


def sizes(tied):
    """Two key heads, which 4 tensor-parallel ranks replicate; 31 tokens, which divide unequally.

    So ranks of one tensor-parallel group have buckets of other lengths, cut elsewhere over dp.
    """
    return LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=40, num_layers=4, num_heads=8,
        num_kv_heads=2, tie_embeddings=tied,
    )  # fmt: skip


def build(config, seed=3):
    torch.manual_seed(seed)
    model = Llama(config).double()
    for parameter in model.parameters():  # the usual 0.02 leaves attention nearly uniform
        parameter.data.mul_(6.0 if parameter.ndim == 2 else 1.0)
    return model


def optimizer_of(model):
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def global_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(30, (BATCH, LENGTH + 1), generator=generator)
    return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:].clone()}


def train(model, optimizer, scheduler, manager, step):
    optimizer.zero_grad()
    train_step(model, shard_global_batch(global_batch(step), 1, manager), manager)
    optimizer.step()
    scheduler.step()


def setup(layout, tied, seed=3, stage=0, schedule="1f1b"):
    dp, pp, cp, tp = layout
    manager = setup_process_group_manager(tp_size=tp, cp_size=cp, pp_size=pp, dp_size=dp)
    model = parallelize(
        build(sizes(tied), seed), manager, bucket_size=3000, schedule=schedule, rehearse=False
    )
    optimizer, scheduler = optimizer_of(model)
    if stage:
        shard_optimizer(optimizer, model, stage=stage, overlap=stage == 1)
    return model, optimizer, scheduler, manager


def whole(model, optimizer, manager):
    """Return weights and the optimizer's state as one process has them, and its numbers."""
    state = full_state_dict(model, manager)
    for key in ("exp_avg", "exp_avg_sq"):
        found = gather_full(model, joined(model, optimizer, key, manager), manager)
        state |= {f"{key} {name}": tensor for name, tensor in found.items()}
    steps = {str(of["step"]) for of in optimizer.state.values()}
    rates = [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups]
    return state, (steps, rates)


def joined(model, optimizer, key, manager):
    """Return a state of all parameters on this rank, of whose ranges others may have some."""
    flat = {name: torch.zeros_like(p).flatten() for name, p in model.named_parameters()}
    for shard in parameter_shards(model):
        if not shard.replicated or get_rank(manager.cp_dp_group) == 0:
            state = optimizer.state[shard.tensor][key].detach().flatten()
            flat[shard.name][shard.start : shard.stop] = state
    every = torch.cat([*flat.values()])
    all_reduce(every, group=manager.cp_dp_group)
    parts = zip(model.named_parameters(), every.split([*map(len, flat.values())]), strict=True)
    return {name: part.view_as(parameter) for (name, parameter), part in parts}


def save_on(layout, root, tied, stage=0, asynchronous=False, schedule="1f1b"):
    model, optimizer, scheduler, manager = setup(layout, tied, stage=stage, schedule=schedule)
    for step in range(STEPS):
        train(model, optimizer, scheduler, manager, step)
    expected = whole(model, optimizer, manager)
    saving = save(
        root / label(layout), model, optimizer, manager, step=STEPS, scheduler=scheduler,
        extra={"position": [STEPS, (1, 2)]}, asynchronous=asynchronous,
    )  # fmt: skip
    if asynchronous:  # what is written is what was, not what is
        train(model, optimizer, scheduler, manager, STEPS)
    saving.wait()
    destroy_process_group_manager()
    if is_main_process():
        torch.save(expected, root / f"{label(layout)}.pt")


def spoil(model, optimizer, scheduler):
    """Leave no weight and no number of the optimizer as it is, so that loading has to bring it."""
    kept = [tensor for of in optimizer.state.values() for tensor in of.values()]
    for tensor in [*model.parameters(), *kept]:
        tensor.data.fill_(torch.nan)
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = torch.nan
    scheduler.last_epoch = -1


def load_on(layout, root, tied, sources, stage=0, schedule="1f1b"):
    """Load what each source saved; return the weights after one more step from the last one."""
    model, optimizer, scheduler, manager = setup(layout, tied, 8, stage, schedule)
    for source in sources:
        spoil(model, optimizer, scheduler)
        loaded = load(root / label(source), model, optimizer, manager, scheduler=scheduler)
        assert (loaded.step, loaded.extra) == (STEPS, {"position": [STEPS, (1, 2)]})
        assert scheduler.last_epoch == STEPS
        expected, numbers = saved_by(root, source)
        found, found_numbers = whole(model, optimizer, manager)
        missing = set(expected) ^ set(found)
        if tied:  # the state of a tied parameter goes by its first name, or the one that is here
            missing = {name for name in missing if "lm_head" not in name and "embed" not in name}
        assert not missing
        for name in set(expected) & set(found):
            assert torch.equal(found[name], expected[name]), f"{source} -> {layout}: {name}"
        assert found_numbers == numbers
    train(model, optimizer, scheduler, manager, STEPS)
    after = full_state_dict(model, manager)
    destroy_process_group_manager()
    return after


@functools.cache  # of a rank, which loads it on one layout after another; nobody changes it
def saved_by(root, source):
    return torch.load(root / f"{label(source)}.pt")


@functools.cache
def one_process(tied):
    assert get_process_group_manager() is None
    manager = setup_process_group_manager()
    model = build(sizes(tied))
    model = parallelize(model, manager, rehearse=False)
    optimizer, scheduler = optimizer_of(model)
    for step in range(STEPS + 1):
        train(model, optimizer, scheduler, manager, step)
    destroy_process_group_manager()
    return model.state_dict()


def assert_close(found, expected, what):
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        error = (found[name] - tensor).norm() / tensor.norm()
        assert error < BOUND, f"{what} {name}: {error:.1e}"


def layouts(world_size):
    every = itertools.product(range(1, world_size + 1), repeat=4)
    return [layout for layout in every if torch.Size(layout).numel() == world_size]


def label(layout):
    return "x".join(map(str, layout))


preload("torch.distributed.tensor", "torch.distributed.checkpoint")  # 2 s a rank


@pytest.fixture(scope="module")
def four():
    with RankPool(4, seed=0) as pool:
        yield pool


@pytest.fixture(scope="module")
def saved_by_four(four, tmp_path_factory):
    root = tmp_path_factory.mktemp("four")
    for number, layout in enumerate(layouts(4)):  # every other one with a sharded optimizer
        four.run(save_on, layout, root, True, stage=1 - number % 2)
    return root


@pytest.mark.parametrize("layout", today(layouts(4), 2), ids=label)
def test_four_ranks_load_what_every_layout_of_four_has_saved(layout, four, saved_by_four):
    stage = layouts(4).index(layout) // 2 % 2
    after = four.run(load_on, layout, saved_by_four, True, layouts(4), stage=stage)
    expected = one_process(tied=True)
    for rank, state in enumerate(after):
        assert_close(state, expected, f"{layout} rank {rank}")


EIGHT = [(2, 2, 1, 2), (1, 2, 2, 2), (8, 1, 1, 1), (1, 1, 1, 8)]


def test_eight_ranks_untied_and_in_the_background(tmp_path):
    with RankPool(8, seed=0, timeout=200) as eight:
        for stage, layout in zip([0, 1, 2, 0], EIGHT, strict=True):
            eight.run(save_on, layout, tmp_path, False, stage=stage, asynchronous=True)
        expected = one_process(tied=False)
        for number, layout in enumerate(EIGHT):
            sources = [EIGHT[number - 1], EIGHT[number - 2]]
            state = eight.run(load_on, layout, tmp_path, False, sources)[0]
            assert_close(state, expected, f"{layout}")
    load_on((1, 1, 1, 1), tmp_path, False, EIGHT)


def test_ranks_with_several_stages(four, tmp_path):
    """On a pipeline in the shape of a V the first rank has both ends, and their tie."""
    four.run(save_on, (1, 2, 1, 2), tmp_path, True, schedule="zb_v")
    loaded = [(1, 2, 1, 2)]
    four.run(load_on, (2, 2, 1, 1), tmp_path, True, loaded, 1, schedule="interleaved_1f1b")
    load_on((1, 1, 1, 1), tmp_path, True, loaded)


def test_one_process_saves_for_four_ranks(four, tmp_path):
    save_on((1, 1, 1, 1), tmp_path, True)
    four.run(load_on, (1, 2, 1, 2), tmp_path, True, [(1, 1, 1, 1)])
