"""The norm over the grid counts each element once, and clipping by it is one process's."""

import functools
import math
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from small_decoder import PLAN, PP, TP, V, batch, loss_of, made
from sweeps import today
from torch import distributed, nn
from training import grid, in_one_process, llama, sizes_of, tokens, train_and_compare

from scaletorch.compose import (
    clip_grad_norm_,
    full_gradients,
    full_state_dict,
    global_grad_norm,
    nonfinite_gradients,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist import NonFiniteError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks
from scaletorch.parallel.data_parallel import parameter_shards, shard_optimizer
from scaletorch.parallel.tensor_parallel import Divide, Fused, apply_tensor_parallel

ORDERS = (2.0, 1.0, math.inf)
CLIP = 0.25


def with_momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)


def build(tied):
    model = llama(3, num_kv_heads=1, tie_embeddings=tied).double()
    for parameter in model.parameters():  # the usual 0.02 leaves attention nearly uniform
        parameter.data.mul_(6.0 if parameter.ndim == 2 else 1.0)
    return model


@functools.cache
def one_process(tied):
    return in_one_process(build(tied), [tokens(), tokens()], with_momentum, clip=CLIP)


def norms_of(tensors):
    flat = torch.cat([t.flatten() for t in {id(t): t for t in tensors}.values()])
    return [torch.linalg.vector_norm(flat, order).item() for order in ORDERS]


def stepped(manager, tied, zero=False):
    model = parallelize(build(tied), manager, bucket_size=900, rehearse=False)
    if zero:
        shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    train_step(model, shard_global_batch(tokens(), 2, manager), manager)
    return model


def measure(model, manager):
    """Return the norms, and how many collectives each took."""
    norms, calls = [], []
    for order in ORDERS:
        with patch("torch.distributed.all_reduce", wraps=distributed.all_reduce) as spy:
            norms.append(global_grad_norm(model, manager, norm_type=order).item())
        calls.append(spy.call_count)
    return norms, calls


def clipped(layout, tied):
    """Return norms of a step, those of its clipped gradients, and these gradients."""
    with grid(sizes_of(layout)) as manager:
        model = stepped(manager, tied)
        norms, calls = measure(model, manager)
        assert clip_grad_norm_(model, CLIP, manager).item() == norms[0]
        return norms, calls, measure(model, manager)[0], full_gradients(model, manager)


LAYOUTS = [  # and whether embeddings are tied
    ((1, 2, 1, 2), False), ((1, 2, 1, 2), True), ((2, 1, 1, 2), False), ((2, 2, 1, 1), True),
    ((1, 1, 2, 2), False), ((1, 1, 1, 4), True), ((2, 2, 1, 2), True),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "tied"), today(LAYOUTS, 4))
def test_layouts_have_one_process_s_norm(layout, tied):
    gradients = one_process(tied).gradients[0]
    kept = [g for name, g in gradients.items() if not (tied and name.startswith("lm_head"))]
    expected = norms_of(kept)
    expected_calls = [(layout[1] > 1) + (layout[3] > 1)] * 3
    results = run_ranks(clipped, math.prod(layout), layout, tied, timeout=200)
    for norms, calls, after, found in results:
        assert norms[0] == results[0][0][0]  # the same bits
        assert norms == pytest.approx(expected, rel=1e-10)
        assert calls == expected_calls
        assert after == pytest.approx([n * CLIP / expected[0] for n in expected], rel=1e-5)
        for name, gradient in found.items():
            part = gradients[name] * CLIP / expected[0]
            torch.testing.assert_close(gradient, part, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize(
    ("layout", "stage"),
    today([((2, 2, 1, 1), 1), ((2, 1, 1, 2), 2), ((1, 1, 2, 2), 1), ((1, 2, 2, 1), 2)], 4),
)
def test_sharded_optimizers_are_clipped_as_one_process(layout, stage):
    build_tied, batches = functools.partial(build, True), [tokens(), tokens()]
    given = one_process(True), build_tied, sizes_of(layout), batches
    options, bounds = {"bucket_size": 900}, {"bound": 1e-9}
    how = {"micro_batches": 2, "stage": stage, "clip": CLIP, "options": options, "bounds": bounds}
    train_and_compare(*given, with_momentum, **how)


class Packed(nn.Module):
    """Queries of four heads, keys and values of one, in one weight."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_kv_heads = 4, 1
        self.qkv = nn.Linear(8, 6 * 3)
        self.out = nn.Linear(12, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).split([n * 3 for n in (self.num_heads, 1, 1)], -1)
        q, k, v = (t.unflatten(-1, (-1, 3)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


PACKED = {"": Divide("num_heads"), "qkv": Fused("column", (12, 3, 3)), "out": "row"}


def packed(sizes):
    torch.manual_seed(0)
    model = Packed().double()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with grid(sizes) as manager:
        if manager.tp_size > 1:
            apply_tensor_parallel(model, PACKED, manager.tp_group)
        model(x).sin().sum().backward()  # alike over dp
        return norms_of([p.grad for p in model.parameters()]), measure(model, manager)[0]


def test_replicated_parts_of_fused_weights_count_once():
    expected, _ = packed({})
    for _, norms in run_ranks(packed, 4, {"dp_size": 2, "tp_size": 2}):
        assert norms == pytest.approx(expected, rel=1e-12)


def poisoned(layout, name, places, value):
    """Put one bad element in gradients, or in the shard that ends a parameter, and look for it."""
    with grid(sizes_of(layout)) as manager:
        model = stepped(manager, tied=False, zero=not places)
        assert nonfinite_gradients(model, manager) == []
        place = str(manager.grid.coordinates(manager.global_rank))
        if places:
            own = [dict(model.named_parameters())[name]] if place in places else []
        else:
            shards = [s for s in parameter_shards(model) if s.name.split("module.")[-1] == name]
            own = [s.tensor for s in shards if s.stop == s.parameter.numel()]
        for tensor in own:
            tensor.grad.view(-1)[-1] = value
        found = nonfinite_gradients(model, manager)
        with pytest.raises(NonFiniteError) as caught:
            clip_grad_norm_(model, CLIP, manager, error_if_nonfinite=True)
    return found, str(caught.value), place if own else None


WEIGHT = "layers.1.mlp.up_proj.weight"
VICTIMS = [  # of the last, a rank of the second stage has the end
    ((1, 2, 1, 2), WEIGHT, ("dp0 pp1 cp0 tp1",), math.inf),
    ((2, 1, 1, 2), WEIGHT, ("dp0 pp0 cp0 tp1", "dp1 pp0 cp0 tp1"), math.nan),
    ((2, 2, 1, 1), "norm.weight", (), -math.inf),
]


@pytest.mark.parametrize(("layout", "name", "places", "value"), VICTIMS)
def test_what_is_not_finite_somewhere_is_named_everywhere(layout, name, places, value):
    results = run_ranks(poisoned, 4, layout, name, places, value)
    guilty = [place for *_, place in results if place]
    assert places in ((), tuple(guilty))
    assert guilty
    for found, message, _ in results:
        assert found == [(name, place) for place in guilty]
        assert f"{name} on {', '.join(guilty)}. Skip the step" in message


def ours(model):
    clip_grad_norm_(model, 0.01)


def nothing(_):
    pass


def plain_steps(change):
    model = made()
    model.embed.sparse = True
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        if change is ours:
            grads = [p.grad.to_dense() for p in model.parameters()]
            norm = nn.utils.get_total_norm(grads)
            nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(change, sizes, **options):
    """Return the largest error of a weight."""
    with grid(sizes) as manager:
        if manager.tp_size > 1:
            options["plan"] = {n: s for n, s in PLAN.items() if n != "embed"}
        plain = made()
        plain.embed.sparse = True
        model = parallelize(plain, manager, **options, rehearse=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        for step in range(2):
            train_step(model, shard_global_batch(batch(step), 2, manager))
            change(model)
            optimizer.step()
            optimizer.zero_grad()
        now, wanted = full_state_dict(model), plain_steps(change)
    return max(float(relative_error(now[name], value)) for name, value in wanted.items())


@distributed_test(2, timeout=200)
def test_sparse_gradients_are_clipped_by_the_norm_of_the_whole():
    for sizes, options in ((TP, {}), (PP, {}), (PP, dict([V]))):
        for change in (ours, nothing):
            with warnings.catch_warnings(action="error"):
                error = train(change, sizes, **options)
            assert error < 1e-12, (sizes, change, error)


# What a program changes after `parallelize` and before clipping is followed.


def check_clipping(layout, stage, change):
    with grid(layout) as manager:
        plain, model = llama().double(), parallelize(llama().double(), manager, rehearse=False)
        ours = torch.optim.SGD(model.parameters(), lr=1.0)
        theirs = torch.optim.SGD(plain.parameters(), lr=1.0)
        if stage:
            shard_optimizer(ours, model, stage=stage)
        train_step(model, shard_global_batch(tokens(), 1, manager))
        logits = plain(tokens()["input_ids"]).flatten(0, 1)
        nn.functional.cross_entropy(logits, tokens()["labels"].flatten()).backward()
        for each in (model, plain):
            for name, parameter in each.named_parameters():
                if name.endswith("layernorm.weight"):
                    change(parameter)
        norm = clip_grad_norm_(model, 0.1)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        torch.testing.assert_close(norm, expected, rtol=1e-9, atol=0)
        torch.testing.assert_close(global_grad_norm(model).item(), 0.1, rtol=1e-4, atol=0)
        ours.step()
        theirs.step()
        whole = full_state_dict(model)
        for name, each in plain.named_parameters():
            torch.testing.assert_close(whole[name], each.detach(), rtol=1e-9, atol=1e-12, msg=name)


def drop(parameter):
    parameter.grad = None


def put(parameter):
    parameter.grad = torch.full_like(parameter, 5.0)


def freeze(parameter):
    parameter.requires_grad_(False)


@pytest.mark.parametrize("change", [drop, put, freeze])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_norms_and_clipping_follow(four, stage, change):
    four.run(check_clipping, {"dp_size": 2, "tp_size": 2}, stage, change)
