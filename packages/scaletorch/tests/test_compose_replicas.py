"""Ranks that part in silence are found: which step, which tensors, which ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as c10d
from test_samples import Job as Training
from training import FOUR, grid, llama, tokens

from scaletorch.compose import (
    check_replicas,
    clip_grad_norm_,
    eval_step,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.errors import MismatchError, NonFiniteError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pg_manager import destroy_process_group_manager

UNCHECKED = {"data_parallel": {"init_sync": "none"}}


class Job(Training):
    """A small training that compares replicas in every step."""

    def backward(self, step, seed=0):
        batch = tokens(1000 * seed + step)
        self.tokens = batch["input_ids"]
        train_step(self.model, shard_global_batch(batch, 1, self.manager))
        clip_grad_norm_(self.model, 1.0)

    def check(self, step, **options):
        check_replicas(self.model, optimizer=self.optimizer, step=step, **options)

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        destroy_process_group_manager()


def flip(tensor):
    """Change the last bit of one element."""
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[bits.numel() // 2] ^= 1


def run_faults(faults):
    """Let one rank go astray at step 2, after two steps in which nothing is found."""
    for fault, layout, guilty, zero, text in faults:
        kind = NonFiniteError if fault == "nan" else MismatchError
        with Job(layout, zero, lr=0.1) as job, pytest.raises(kind, match=f"(?s){text}"):
            train_with(fault, job, guilty)


def train_with(fault, job, guilty):
    rank = c10d.get_rank()
    for step in range(3):
        job.backward(step, seed=int(fault == "batch" and step == 2 and rank == guilty))
        if step == 2 and rank == guilty:
            ASTRAY[fault](job)
        job.check(step, values={"tokens": len(job.tokens), "batch": job.tokens})
        job.update()


ASTRAY = {
    "weight": lambda job: flip(job.parameter("layers.1.input_layernorm.weight")),
    "tied": lambda job: flip(job.parameter("lm_head.weight")),
    "gradient": lambda job: flip(job.parameter("norm.weight").grad),
    "no gradient": lambda job: setattr(job.parameter("norm.weight"), "grad", None),
    "rate": lambda job: job.optimizer.param_groups[0].update(lr=0.2),
    "nan": lambda job: job.parameter("norm.weight").data[0].fill_(math.nan),
    "tokens": lambda job: setattr(job, "tokens", job.tokens[:2]),
    "batch": lambda job: None,  # it had another one
}
DP, TP, PP = {"dp_size": 4}, {"tp_size": 4}, {"pp_size": 2}
ON = r"{}: on rank {} \(dp{} pp0 cp0 tp{}\) not as on the other 3 of 4"
NORM = "layers.1.input_layernorm.weight"
FAULTS = [
    ("weight", DP, 2, 0, "step 2: .*" + ON.format(f"parameter {NORM}", 2, 2, 0)),
    ("weight", DP, 3, 1, ON.format(f"parameter {NORM}", 3, 3, 0)),
    ("weight", TP, 1, 0, ON.format(f"parameter {NORM}", 1, 0, 1)),
    ("tied", PP, 1, 0, r"on rank 1 \(dp0 pp1 cp0 tp0\) not as on rank 0 \(dp0 pp0 "),
    ("gradient", DP, 0, 0, ON.format("gradient norm.weight", 0, 0, 0)),
    ("gradient", {"dp_size": 2}, 1, 0, "gradient norm.weight: on rank 1 .* not as on rank 0 "),
    ("no gradient", TP, 3, 0, ON.format("gradient norm.weight", 3, 0, 3)),
    ("rate", DP, 1, 2, r"optimizer: on rank 1 .*lr=0.2,.* not as on the other 3 of 4 \(lr=0.1,"),
    ("tokens", TP, 1, 0, r"value tokens: on rank 1 .* \(2\) not as on the other 3 of 4 \(4\)"),
    ("batch", TP, 1, 0, r"step 2: .*value batch: on rank 1 .* not as on the other 3 of 4"),
    ("nan", {"dp_size": 2}, 1, 0, r"step 2: parameters are not finite: norm.weight on rank 1 \(dp1 "
     r"pp0 cp0 tp0\); go back"),
]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_goes_astray_is_named(ranks):
    own = [each for each in FAULTS if math.prod(each[1].values()) == ranks]
    run_ranks(run_faults, ranks, own, timeout=200)


def other_on_each(model):
    torch.nn.init.constant_(model.norm.weight, 1.0 + c10d.get_rank())


@distributed_test(2)
def test_models_that_differ_from_the_start_or_change_later():
    """Begin with other weights, and change the model on one rank."""
    with Job({"dp_size": 2}, prepare=other_on_each, **UNCHECKED) as job:
        job.backward(0)
        words = r"^rank \d \(.*\): ranks that should .*not\.\n  param"
        with pytest.raises(MismatchError, match=words):
            check_replicas(job.model, job.manager)
    with Job({"dp_size": 2}) as job:
        job.backward(0)
        job.check(0)
        if c10d.get_rank():
            job.model.module.extra = torch.nn.Linear(2, 2)
        job.check(1)  # what one rank alone has is compared with nothing
        flip(job.parameter("norm.weight")) if c10d.get_rank() else None
        with pytest.raises(MismatchError, match=r"parameter norm.weight"):
            job.check(2)


def evaluated_before(layouts):
    """Evaluate one batch on all ranks, then train on another one of rank 3's own."""
    for sizes in layouts:
        with grid(sizes) as manager:
            model = parallelize(llama(num_layers=4), manager, rehearse=False)
            eval_step(model, shard_global_batch(tokens(), 2, manager))
            strange = shard_global_batch(tokens(int(manager.global_rank == 3)), 2, manager)
            with pytest.raises(MismatchError, match="different first batches"):
                train_step(model, strange)


def test_an_evaluation_does_not_stand_for_the_first_step():
    run_ranks(evaluated_before, 4, [*FOUR.values()], timeout=200)
