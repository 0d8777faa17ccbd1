"""A checkpoint saved on any layout is the same state on any other, and training goes on from it."""

import functools
import itertools

import pytest
import torch
from checkpointed import adamw, build, joined, train
from sweeps import today

from scaletorch.checkpoint import load, save
from scaletorch.compose import full_state_dict, parallelize
from scaletorch.dist import RankPool, is_main_process
from scaletorch.dist.testing import preload
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    get_process_group_manager,
    setup_process_group_manager,
)

STEPS = 2
BOUND = 1e-12


class Program:
    """A model on a layout, its optimizer and its scheduler."""

    def __init__(self, layout, tied, seed=3, stage=0, schedule="1f1b"):
        dp, pp, cp, tp = layout
        self.manager = setup_process_group_manager(tp_size=tp, cp_size=cp, pp_size=pp, dp_size=dp)
        self.model = parallelize(
            build(seed, tied=tied, layers=4), self.manager, bucket_size=3000, schedule=schedule,
            rehearse=False,
        )  # fmt: skip
        self.optimizer = adamw(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        if stage:
            shard_optimizer(self.optimizer, self.model, stage=stage, overlap=stage == 1)

    def train(self, *steps):
        for step in steps:
            train(self.model, self.optimizer, self.manager, step)
            self.scheduler.step()
        return self

    def whole(self):
        """Return weights and the optimizer's state as one process has them, and its numbers."""
        state, of = full_state_dict(self.model, self.manager), self.optimizer.state
        for key in ("exp_avg", "exp_avg_sq"):
            moments = joined(
                self.model, self.manager, lambda s, key=key: of[s.tensor][key], torch.float64
            )
            state |= {f"{key} {name}": tensor for name, tensor in moments.items()}
        groups = self.optimizer.param_groups
        rates = [(g["lr"], g["weight_decay"], g["betas"]) for g in groups]
        return state, ({str(each["step"]) for each in of.values()}, rates)

    def spoil(self):
        """Leave no weight and no number of the optimizer, so that loading has to bring it."""
        kept = [tensor for of in self.optimizer.state.values() for tensor in of.values()]
        for tensor in [*self.model.parameters(), *kept]:
            tensor.data.fill_(torch.nan)
        for group in self.optimizer.param_groups:
            group["lr"] = group["weight_decay"] = torch.nan
        self.scheduler.last_epoch = -1


def save_on(layout, root, tied, stage=0, asynchronous=False, schedule="1f1b"):
    program = Program(layout, tied, stage=stage, schedule=schedule).train(*range(STEPS))
    expected = program.whole()
    saving = save(
        root / label(layout), program.model, program.optimizer, program.manager, step=STEPS,
        scheduler=program.scheduler, extra={"position": [STEPS, (1, 2)]},
        asynchronous=asynchronous,
    )  # fmt: skip
    if asynchronous:  # what is written is what was, not what is
        program.train(STEPS)
    saving.wait()
    destroy_process_group_manager()
    if is_main_process():
        torch.save(expected, root / f"{label(layout)}.pt")


def load_on(layout, root, tied, sources, stage=0, schedule="1f1b"):
    """Load what each source saved, and compare with one process after one more step."""
    program = Program(layout, tied, 8, stage, schedule)
    for source in sources:
        program.spoil()
        loaded = load(
            root / label(source), program.model, program.optimizer, program.manager,
            scheduler=program.scheduler,
        )  # fmt: skip
        assert (loaded.step, loaded.extra) == (STEPS, {"position": [STEPS, (1, 2)]})
        assert program.scheduler.last_epoch == STEPS
        expected, numbers = saved_by(root, source)
        found, found_numbers = program.whole()
        missing = set(expected) ^ set(found)
        if tied:  # the state of a tied parameter goes by its first name, or the one that is here
            missing = {name for name in missing if "lm_head" not in name and "embed" not in name}
        assert not missing
        for name in set(expected) & set(found):
            assert torch.equal(found[name], expected[name]), f"{source} -> {layout}: {name}"
        assert found_numbers == numbers
    after = full_state_dict(program.train(STEPS).model, program.manager)
    destroy_process_group_manager()
    return after


@functools.cache  # of a rank, which loads it on one layout after another; nobody changes it
def saved_by(root, source):
    return torch.load(root / f"{label(source)}.pt")


@functools.cache
def one_process(tied):
    assert get_process_group_manager() is None
    program = Program((1, 1, 1, 1), tied).train(*range(STEPS + 1))
    destroy_process_group_manager()
    return program.model.state_dict()


def assert_as_one_process(states, tied):
    expected = one_process(tied)
    for rank, found in enumerate(states):
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            error = (found[name] - tensor).norm() / tensor.norm()
            assert error < BOUND, f"rank {rank} {name}: {error:.1e}"


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


def test_four_ranks_load_what_layouts_of_four_have_saved(four, tmp_path):
    """Each day one layout loads what five have saved: in 20 days all load what all have."""
    loads, number = {}, layouts(4).index
    for source, layout in today([*itertools.product(layouts(4), repeat=2)], 20):
        loads.setdefault(layout, []).append(source)
    for source in {source: None for sources in loads.values() for source in sources}:
        # Every other one with a sharded optimizer.
        four.run(save_on, source, tmp_path, True, stage=number(source) // 2 % 2)
    for layout, sources in loads.items():
        stage = number(layout) // 2 % 2
        after = four.run(load_on, layout, tmp_path, True, sources, stage=stage)
        assert_as_one_process(after, tied=True)


@pytest.mark.parametrize(
    "pair",  # of layouts, and the stages of ZeRO that save
    today([{(2, 2, 1, 2): 0, (8, 1, 1, 1): 2}, {(1, 2, 2, 2): 1, (1, 1, 1, 8): 0}], 2),
)
def test_eight_ranks_untied_and_in_the_background(pair, tmp_path):
    with RankPool(8, seed=0, timeout=200) as eight:
        for layout, stage in pair.items():
            eight.run(save_on, layout, tmp_path, False, stage=stage, asynchronous=True)
        for layout, source in zip(pair, reversed(pair), strict=True):
            after = eight.run(load_on, layout, tmp_path, False, [source])
            assert_as_one_process(after, tied=False)
    load_on((1, 1, 1, 1), tmp_path, False, [*pair])


def test_ranks_with_several_stages(four, tmp_path):
    """On a pipeline in the shape of a V the first rank has both ends, and their tie."""
    four.run(save_on, (1, 2, 1, 2), tmp_path, True, schedule="zb_v")
    loaded = [(1, 2, 1, 2)]
    four.run(load_on, (2, 2, 1, 1), tmp_path, True, loaded, 1, schedule="interleaved_1f1b")
    load_on((1, 1, 1, 1), tmp_path, True, loaded)


def test_one_process_saves_for_four_ranks(four, tmp_path):
    save_on((1, 1, 1, 1), tmp_path, True)
    four.run(load_on, (1, 2, 1, 2), tmp_path, True, [(1, 1, 1, 1)])
