"""Losses of one's own have the value and the gradients of one process, on any layout."""

import math
import os
import re

import pytest
import torch
import torch.nn.functional as F
from own_losses import (
    LENGTH,
    LOSSES,
    ROWS,
    batch,
    in_one_process,
    language,
    prepare,
    smoothed,
    teacher,
    tokens,
)
from sweeps import today
from training import grid

from scaletorch.compose import (
    eval_step,
    full_gradients,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks, worst
from scaletorch.parallel.data_parallel import GradScaler

LAYOUTS = {
    "dp2": ({"dp_size": 2}, {}),
    "cp2": ({"cp_size": 2}, {}),
    "tp2": ({"tp_size": 2}, {}),
    "tp2_shards": ({"tp_size": 2}, {"loss_parallel": True}),
    "tp2_sequence": ({"tp_size": 2}, {"loss_parallel": True, "sequence_parallel": True}),
    "pp2": ({"pp_size": 2}, {"schedule": "zb_v"}),
    "all8": ({"tp_size": 2, "cp_size": 2, "pp_size": 2}, {"loss_parallel": True}),
    "data8": ({"tp_size": 2, "cp_size": 2, "dp_size": 2}, {"sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def expected():
    return {name: in_one_process(name) for name in LOSSES}


def every_loss(sizes, options):
    """Return the loss, its eval and all gradients of every example, each of one step."""
    found = {}
    with grid(sizes) as manager:
        for name, (build, loss_fn, count_fn, second) in LOSSES.items():
            own = dict(options)
            if name in ("reward", "classes"):  # whose head is whole on every rank
                own.pop("loss_parallel", None)
            # A teacher's outputs are of the whole micro-batch; eight ranks need not rehearse too.
            own["rehearse"] = second is None and manager.world_size == 2
            model = parallelize(build(), manager, **own)
            micro_batches = shard_global_batch(batch(), 2, model=model)
            if second is not None:
                prepare(parallelize(teacher(), manager, **own), *second, micro_batches)
            seen = eval_step(model, micro_batches, loss_fn=loss_fn)
            loss = train_step(model, micro_batches, loss_fn=loss_fn, count_fn=count_fn)
            found[name] = loss.item(), seen.item(), full_gradients(model)
    return found


@pytest.mark.parametrize("layout", today([*LAYOUTS], 8))
def test_every_loss_is_one_process_s(layout, expected):
    sizes, options = LAYOUTS[layout]
    for rank in run_ranks(every_loss, math.prod(sizes.values()), sizes, options, timeout=200):
        for name, (loss, gradients) in expected.items():
            found, seen, theirs = rank[name]
            assert found == pytest.approx(loss, rel=1e-12), name
            assert seen == pytest.approx(loss, rel=1e-12), name
            assert theirs.keys() == gradients.keys()
            errors = [relative_error(theirs[n], g) for n, g in gradients.items()]
            assert worst(errors) < 1e-11, (name, errors)


def accumulated(sizes):
    """Two steps whose gradients add up in no_sync, with a loss scale."""
    with grid(sizes) as manager:
        model = parallelize(language(), manager, rehearse=False)
        micro_batches = shard_global_batch(batch(), 2, model=model)
        scaler = GradScaler("cpu", 2.0**8)
        with model.no_sync():
            train_step(model, micro_batches, loss_fn=smoothed, scaler=scaler)
        loss = train_step(model, micro_batches, loss_fn=smoothed, scaler=scaler)
        return loss.item(), full_gradients(model)


def test_no_sync_and_a_loss_scale(expected):
    loss, gradients = expected["smoothing"]
    for found, theirs in run_ranks(accumulated, 4, {"dp_size": 2, "pp_size": 2}):
        assert found == pytest.approx(loss, rel=1e-12)
        errors = [relative_error(theirs[n] / 2**9, g) for n, g in gradients.items()]
        assert worst(errors) < 1e-11


def text():
    """Return the bytes of a real text in rows, the last of them filled up."""
    found = torch.tensor(list(os.__doc__.encode())) % 32
    windows = found[: LENGTH * (ROWS * 2 - 1) + 1]
    whole = F.pad(windows[:-1], (0, LENGTH)).view(ROWS * 2, LENGTH)
    labels = F.pad(windows[1:], (0, LENGTH), value=-100).view(ROWS * 2, LENGTH)
    return {"input_ids": whole, "labels": labels}


def perplexity(sizes, options):
    inside = set()
    with grid(sizes) as manager:
        model = parallelize(language(), manager, **options, rehearse=False)
        modules = [*model.train().modules()]
        modules[-1].eval()
        for module in modules:
            module.register_forward_hook(lambda this, *_: inside.add(this.training))
        modes = [module.training for module in modules]
        loss = eval_step(model, shard_global_batch(text(), 2, model=model))
        assert modes == [module.training for module in modules]
        return loss.exp().item(), loss.dtype, inside


@pytest.mark.parametrize("layout", today(["all8", "data8"], 2))
def test_perplexity_of_a_text(layout):
    whole = text()
    logits = language()(whole["input_ids"])
    loss = F.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten())
    for found, dtype, inside in run_ranks(perplexity, 8, *LAYOUTS[layout]):
        assert found == pytest.approx(loss.exp().item(), rel=1e-12)
        assert (dtype, inside) == (torch.float64, {False})


def rank():
    return torch.distributed.get_rank()


def unlike(output, batch):
    total, count = smoothed(output, batch)
    return total * (1 + rank()), count


def fails(output, batch):
    raise KeyError("nothing of that name")


def on_one_rank(output, batch):
    """Wrong on one rank of the last stage alone."""
    return "nothing" if rank() == 3 else (output.sum(), tokens(batch))


def counted(count_fn):
    return {"loss_fn": smoothed, "count_fn": count_fn}


# A loss, or what is said to `train_step`, and in which words it is refused.
SUM = "must return .sum of the losses"
WRONG = {
    "no pair": (lambda output, _: output.sum(), f"{SUM}, .* returned a tensor of"),
    "no number": (lambda output, _: (output.sum(), math.nan), "number of at least 0, got na"),
    "no scalar": (
        lambda output, batch: (output.sum(-1), tokens(batch)),
        "one floating-point element; .* returned a tensor of shape",
    ),
    "detached": (
        lambda output, batch: (output.detach().sum(), tokens(batch)), "loss_fn has no gradient",
    ),
    "no one count": (
        lambda output, _: (output.sum(), torch.ones(2)),
        r"their number.; it returned .*; a tensor of shape \[2\]",
    ),
    "half": (lambda output, batch: (output.logsumexp(-1).sum(), tokens(batch)), "in tp alone"),
    "fails": (fails, "nothing of that name"),
    "on one rank": (on_one_rank, f"{SUM}.* returned str"),
    "unlike": (unlike, "on rank 3 and .* on rank 2.* in tp alone: .*vocabulary_sums"),
    "miscounted": (
        {"loss_fn": lambda o, b: (o.sum(), tokens(b) + 1), "count_fn": tokens},
        "loss_fn counted .* and count_fn gave .* pass.*count_fn=",
    ),
    "no count": (counted(lambda _: -1), "at least 0, got -1"),
    "nothing": (counted(lambda _: 0), "have anything that the loss counts"),
    "a string": ("mse", "loss_fn must be a function, got str"),
    "count alone": ({"count_fn": tokens}, "count_fn counts the losses of a loss_fn"),
}  # fmt: skip


def refused(sizes, options, names):
    heard = {}
    with grid(sizes) as manager:
        for name in names:
            own, _ = WRONG[name]
            model = parallelize(language(), manager, **options, rehearse=False)
            heard[name], told = [], own if isinstance(own, dict) else {"loss_fn": own}
            for wrong in (told, {"loss_fn": smoothed}):  # afterwards a step goes well
                try:
                    train_step(model, shard_global_batch(batch(), 2, model=model), **wrong)
                    heard[name].append("")
                except Exception as error:
                    heard[name].append(f"{type(error).__name__}: {error}")
    return heard


def test_what_a_loss_returns_is_refused_on_every_rank():
    sizes = {"tp_size": 2, "pp_size": 2}
    for rank in run_ranks(refused, 4, sizes, {"loss_parallel": True}, [*WRONG]):
        for name, (first, second) in rank.items():
            assert re.search(WRONG[name][1], first, re.DOTALL), (name, first)
            assert second == "", (name, second)


@distributed_test(2)
def test_a_loss_on_some_ranks_alone_and_its_entries():
    with grid({"dp_size": 2}) as manager:
        model = parallelize(language(), manager, rehearse=False)
        micro_batches = shard_global_batch(batch(), 2, model=model)
        own = {"loss_fn": smoothed} if manager.global_rank else {}
        with pytest.raises(Exception, match=r"rank 0 differs.*|a loss_fn of its own"):
            train_step(model, micro_batches, **own)
        with pytest.raises(ValueError, match=r"loss_last has shape .* the 8 rows of the batch"):
            shard_global_batch({**batch(), "loss_last": torch.zeros(3)}, 2, model=model)
        with pytest.raises(ValueError, match="token_losses takes the micro-batch that loss_fn"):
            smoothed(torch.zeros(1, 1, 1), micro_batches[0])
