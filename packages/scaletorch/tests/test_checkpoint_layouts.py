"""A checkpoint saved on any layout is the same state on any other, and training goes on from it."""

import functools
import itertools
import math

import pytest
import torch
from checkpointed import adamw, assert_equal, build, grid, joined, train
from sweeps import today

from scaletorch.checkpoint import load, save
from scaletorch.compose import full_state_dict, parallelize
from scaletorch.dist import RankPool, is_main_process
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import destroy_process_group_manager

STEPS = 2
BOUND = 1e-12
ONE = (1, 1, 1, 1)
EXTRA = {"position": [STEPS, (1, 2)]}


class Program:
    """A model on a layout, its optimizer and its scheduler."""

    def __init__(self, layout, tied, seed=3, stage=0, schedule="1f1b"):
        self.manager = grid(layout)
        self.model = parallelize(
            build(seed, tied=tied, layers=4), self.manager, bucket_size=3000, schedule=schedule,
            rehearse=False,
        )  # fmt: skip
        self.optimizer = adamw(self.model)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.state = self.model, self.optimizer, self.manager
        if stage:
            shard_optimizer(self.optimizer, self.model, stage=stage, overlap=stage == 1)

    def train(self, *steps):
        for step in steps:
            train(*self.state, step)
            self.scheduler.step()
        return self

    def whole(self):
        """Return weights and the optimizer's state as one process has them, and its numbers."""
        state, of = full_state_dict(self.model, self.manager), self.optimizer.state
        for key in ("exp_avg", "exp_avg_sq"):
            moment = functools.partial(lambda key, shard: of[shard.tensor][key], key)
            moments = joined(self.model, self.manager, moment, torch.float64)
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
        root / str(layout), *program.state, step=STEPS, scheduler=program.scheduler, extra=EXTRA,
        asynchronous=asynchronous,
    )  # fmt: skip
    if asynchronous:  # what is written is what was, not what is
        program.train(STEPS)
    saving.wait()
    destroy_process_group_manager()
    if is_main_process():
        torch.save(expected, root / f"{layout}.pt")


def load_on(layout, root, tied, sources, stage=0, schedule="1f1b"):
    """Load what each source saved; return the weights after one more step."""
    program = Program(layout, tied, 8, stage, schedule)
    for source in sources:
        program.spoil()
        loaded = load(root / str(source), *program.state, scheduler=program.scheduler)
        assert (loaded.step, loaded.extra) == (STEPS, EXTRA)
        assert program.scheduler.last_epoch == STEPS
        expected, numbers = saved_by(root, source)
        found, found_numbers = program.whole()
        missing = set(expected) ^ set(found)
        if tied:  # the state of a tied parameter goes by its first name, or the one that is here
            missing = {name for name in missing if "lm_head" not in name and "embed" not in name}
        assert not missing
        common = set(expected) & set(found)
        assert_equal({name: found[name] for name in common}, {n: expected[n] for n in common})
        assert found_numbers == numbers
    after = full_state_dict(program.train(STEPS).model, program.manager)
    destroy_process_group_manager()
    return after


@functools.cache  # of a rank, which loads it on one layout after another; nobody changes it
def saved_by(root, source):
    return torch.load(root / f"{source}.pt")


@functools.cache
def one_process(tied):
    program = Program(ONE, tied).train(*range(STEPS + 1))
    destroy_process_group_manager()
    return program.model.state_dict()


def assert_as_one_process(states, tied):
    expected = one_process(tied)
    for rank, found in enumerate(states):
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            error = (found[name] - tensor).norm() / tensor.norm()
            assert error < BOUND, f"rank {rank} {name}: {error:.1e}"


def test_four_ranks_load_what_layouts_of_four_have_saved(four, tmp_path):
    """Each day one layout loads what five have saved: in 20 days all load what all have."""
    layouts = [each for each in itertools.product((1, 2, 4), repeat=4) if math.prod(each) == 4]
    loads = {}
    for source, layout in today([*itertools.product(layouts, repeat=2)], 20):
        loads.setdefault(layout, []).append(source)
    stages = {layout: number // 2 % 2 for number, layout in enumerate(layouts)}  # half are sharded
    for source in dict.fromkeys(itertools.chain(*loads.values())):
        four.run(save_on, source, tmp_path, True, stage=stages[source])
    for layout, sources in loads.items():
        after = four.run(load_on, layout, tmp_path, True, sources, stage=stages[layout])
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
    load_on(ONE, tmp_path, False, [*pair])


def test_ranks_with_several_stages(four, tmp_path):
    """On a pipeline in the shape of a V the first rank has both ends, and their tie."""
    four.run(save_on, (1, 2, 1, 2), tmp_path, True, schedule="zb_v")
    saved = [(1, 2, 1, 2)]
    four.run(load_on, (2, 2, 1, 1), tmp_path, True, saved, 1, schedule="interleaved_1f1b")
    load_on(ONE, tmp_path, True, saved)
    save_on(ONE, tmp_path, True)
    four.run(load_on, (1, 2, 1, 2), tmp_path, True, [ONE])
