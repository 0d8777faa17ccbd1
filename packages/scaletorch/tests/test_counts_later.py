"""A loss counts as it goes: gradients are divided by an estimate, and corrected by the count."""

import functools

import pytest
import torch
from sweeps import today
from test_batch_rows import decoder, steps
from torch import nn
from training import (
    FOUR,
    adamw,
    cross_entropy,
    grid,
    in_one_process,
    on_a_layout,
    require_alike,
    tokens,
)

from scaletorch.compose import full_gradients, parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import InvalidArgumentError, MismatchError
from scaletorch.dist.testing import relative_error
from scaletorch.parallel.pg_manager import get_process_group_manager

LAYOUTS = {
    **FOUR,
    **{f"dp 4, ZeRO {stage}": {"dp_size": 4, "stage": stage} for stage in (1, 2)},
}
CASES = [  # and the size of a token in the loss's count
    *((name, 1.0) for name in LAYOUTS),
    ("dp 4, ZeRO 2", 1e-4), ("tp 2 x pp 2", 1e-4), ("dp 4, ZeRO 2", 3e4),
]  # fmt: skip
ROWS = (7, 2, 5)  # of the steps


def weighted(size, output, micro_batch):
    """Return a loss whose count depends on what the model returns, in tokens of some size."""
    logits = getattr(output, "logits", output)
    weights = size * torch.sigmoid(logits.detach().logsumexp(-1))
    weights = weights * (micro_batch["labels"] != -100)
    return ((logits**2).mean(-1) * weights).sum(), weights.sum()


@pytest.mark.parametrize(("layout", "size"), today(CASES, 7))
def test_steps_are_those_of_one_process(four, layout, size):
    sizes, loss_fn = dict(LAYOUTS[layout]), functools.partial(weighted, size)
    batches = steps(ROWS)
    expected = in_one_process(decoder(), batches, adamw, loss_fn=loss_fn, clip=1.0)
    how = {"stage": sizes.pop("stage", 0), "clip": 1.0, "loss_fn": loss_fn, "micro_batches": 2}
    for found in four.run(on_a_layout, decoder, sizes, batches, adamw, **how):
        require_alike(found, expected, weights=1e-9)


class Pixels(nn.Module):
    def __init__(self, frozen=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.layers[1].requires_grad_(not frozen)

    def forward(self, images):
        for layer in self.layers:
            images = layer(images)
        return images


def of_pixels(output, micro_batch):
    wide = output.float() - micro_batch["loss_target"].float()
    return (wide**2).sum(), wide.numel()


def images(step, dtype=torch.float64):
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randn(2, 8, 3, 64, 64, generator=generator).to(dtype)
    return {"images": drawn[0], "loss_target": drawn[1]}


def in_16_bits():
    """Return the first step's largest gradient where a row has 12,288 losses."""
    with grid({"dp_size": 4}) as manager:
        torch.manual_seed(0)
        model = parallelize(Pixels().half(), manager, rehearse=False)
        cut = shard_global_batch(images(0, torch.float16), 2, model=model)
        train_step(model, cut, loss_fn=of_pixels)
        return max(g.abs().max().item() for g in full_gradients(model).values())


def test_float16_does_not_overflow(four):
    assert all(0 < found < 10 for found in four.run(in_16_bits))


def added_up(sizes, frozen):
    """Add the gradients of two steps up; return them."""
    with grid(sizes) as manager:
        torch.manual_seed(0)
        model = parallelize(Pixels(frozen).double(), manager)
        cuts = [shard_global_batch(images(step), 2, model=model) for step in range(2)]
        train_step(model, cuts[0], loss_fn=of_pixels)
        kinds = InvalidArgumentError, MismatchError
        with pytest.raises(kinds, match=r"gradients of earlier steps|rank 3"):
            train_step(model, cuts[1], loss_fn=of_pixels)
        model.zero_grad()
        for cut in cuts:
            train_step(model, cut, loss_fn=of_pixels, count_fn=lambda b: b["images"].numel())
        return full_gradients(model)


# A rank of a frozen stage has no gradients of the step before, and hears of the others'.
@pytest.mark.parametrize(
    ("sizes", "frozen"), [({"dp_size": 4}, False), ({"dp_size": 2, "pp_size": 2}, True)], ids=str
)
def test_gradients_of_several_steps_need_the_count_before(four, sizes, frozen):
    torch.manual_seed(0)
    model = Pixels(frozen).double()
    for step in range(2):
        whole = images(step)
        total, count = of_pixels(model(whole["images"]), whole)
        (total / count).backward()
    for found in four.run(added_up, sizes, frozen):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                assert relative_error(found[name], parameter.grad) < 1e-6, name


def counted_apart(output, micro_batch):
    """Return the loss of tokens; after the first micro-batch tp ranks count differently."""
    total, count = cross_entropy(output, micro_batch)
    return total, count + get_process_group_manager().tp_rank * micro_batch["loss_more"].sum()


def apart(sizes):
    with grid(sizes) as manager:
        model = parallelize(decoder(), manager, rehearse=False)
        whole = {**tokens(), "loss_more": torch.tensor([0, 0, 1, 1])}
        with pytest.raises(MismatchError, match=r"loss_fn counted 32, 34.* differ in tp alone"):
            train_step(model, shard_global_batch(whole, 2, model=model), loss_fn=counted_apart)


@pytest.mark.parametrize("sizes", [{"tp_size": 2, "pp_size": 2}, {"tp_size": 4}], ids=str)
def test_tp_ranks_that_count_differently_are_refused(four, sizes):
    four.run(apart, sizes)
