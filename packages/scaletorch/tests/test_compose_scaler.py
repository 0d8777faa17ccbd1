"""Loss scaling through `train_step`: the loss stays, overflow skips on every rank of the grid."""

import math

import pytest
import torch
from training import grid, in_one_process, llama, sizes_of, tokens

from scaletorch.compose import (
    clip_grad_norm_,
    full_state_dict,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.data_parallel import GradScaler, parameter_shards, shard_optimizer

STEPS = 3
SCALE = 2.0**10


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def train(layout, scale, half="", poison=None, interval=2000, clip=1.0):
    """Train with a loss scale, or None; return losses, norms, scales and whole weights.

    With `half` forwards run under autocast, or float16 parameters have float32 masters in shards.
    The rank `poison` gets an infinite gradient in the first step.
    """
    losses, norms, scales = [], [], []
    with grid(sizes_of(layout)) as manager:
        plain = llama().half() if half == "masters" else llama()
        if half == "autocast":  # around forward alone: backward must not run under it
            plain.__dict__["forward"] = torch.autocast("cpu", torch.float16)(plain.forward)
        model = parallelize(plain, manager, rehearse=not half)
        optimizer = sgd(model)
        if half == "masters":
            shard_optimizer(optimizer, model)
        scaler = GradScaler(
            "cpu", scale or 1.0, growth_interval=interval, enabled=scale is not None
        )
        for step in range(STEPS):
            micro_batches = shard_global_batch(tokens(step), 2, manager)
            losses.append(train_step(model, micro_batches, scaler=scaler).item())
            gradients = [s.tensor.grad for s in parameter_shards(model)]
            assert {g.dtype for g in gradients} == {torch.float32}
            if step == 0 and str(manager.grid.coordinates(manager.global_rank)) == poison:
                gradients[0].view(-1)[-1] = math.inf
            scaler.unscale_(optimizer)
            norms.append(clip_grad_norm_(model, clip).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        return losses, norms, scales, full_state_dict(model)


LAYOUTS = [(1, 1, 1, 1), (1, 2, 1, 2), (2, 1, 1, 2), (2, 2, 1, 1)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_scaled_training_has_the_bits_of_unscaled(layout):
    plain = run_ranks(train, math.prod(layout), layout, None)
    for ours, theirs in zip(run_ranks(train, math.prod(layout), layout, SCALE), plain, strict=True):
        assert ours[:2] == theirs[:2]
        assert ours[2] == [SCALE] * STEPS
        assert all(torch.equal(ours[3][name], tensor) for name, tensor in theirs[3].items())


@pytest.mark.parametrize("poison", ["dp0 pp1 cp0 tp0", "dp0 pp0 cp0 tp1"])
def test_overflow_on_one_stage_or_shard_skips_everywhere(poison):
    initial = llama().state_dict()
    results = run_ranks(train, 4, (1, 2, 1, 2), SCALE, poison=poison, interval=1)
    for losses, norms, scales, weights in results:
        assert scales == [SCALE / 2, SCALE, SCALE * 2]
        assert not math.isfinite(norms[0])
        assert all(map(math.isfinite, (*losses, *norms[1:])))
        assert (losses, norms[1:], scales) == (results[0][0], results[0][1][1:], results[0][2])
        for name, tensor in results[0][3].items():
            assert torch.equal(weights[name], tensor)
        assert not torch.equal(weights["norm.weight"], initial["norm.weight"])
        assert all(tensor.isfinite().all() for tensor in weights.values())


def test_float16_overflows_by_itself_and_recovers():
    """A scale beyond float16 makes gradients of logits infinite on the last stage first."""
    results = run_ranks(train, 4, (1, 2, 1, 2), 2.0**22, "autocast")
    exact = train((1, 1, 1, 1), None)
    for losses, _, scales, weights in results:
        assert scales == results[0][2]
        assert scales[0] == 2.0**21
        assert losses[0] == pytest.approx(exact[0][0], rel=1e-2)
        assert all(tensor.isfinite().all() for tensor in weights.values())


@pytest.mark.parametrize("layout", [(2, 1, 1, 2), (2, 1, 2, 1)])
def test_float32_shards_of_float16_parameters(layout):
    """One bad shard skips the first step everywhere; then steps are those of one process."""
    poison = "dp1 pp0 cp0 tp0"
    results = run_ranks(train, 4, layout, SCALE, "masters", poison=poison, clip=math.inf)
    expected = in_one_process(llama(), [tokens(step) for step in range(1, STEPS)], sgd)
    for _, _, scales, weights in results:
        assert scales == [SCALE / 2] * STEPS
        for name, weight in expected.weights.items():
            torch.testing.assert_close(weights[name].float(), weight, rtol=2e-2, atol=2e-3)
