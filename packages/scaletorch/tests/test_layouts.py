"""Every layout gives one process's loss, gradients and stepped weights."""

import itertools
from functools import partial

import pytest
import torch
from mutants.patch import patched

from scaletorch.compose import (
    full_gradients,
    full_state_dict,
    global_grad_norm,
    parallelize,
    shard_global_batch,
    train_step,
)
from scaletorch.dist.testing import run_ranks
from scaletorch.models import Llama, LlamaConfig
from scaletorch.parallel.pg_manager import (
    destroy_process_group_manager,
    setup_process_group_manager,
)

BATCH, LENGTH, STEPS = 8, 12, 2
BOUND = 1e-10


def sizes(tied, num_layers=4):
    return LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_layers=num_layers, num_heads=8,
        num_kv_heads=4, tie_embeddings=tied,
    )  # fmt: skip


def build(config):
    torch.manual_seed(3)
    model = Llama(config).double()
    for parameter in model.parameters():  # the usual 0.02 leaves attention nearly uniform
        parameter.data.mul_(6.0 if parameter.ndim == 2 else 1.0)
    return model


def global_batch(step):
    """Ragged: half of the rows (one dp rank at dp 2) have no valid token, others in each step."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(32, (BATCH, LENGTH + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    masked = step % 2 * (BATCH // 2)
    labels[masked : masked + BATCH // 2] = -100
    labels[masked - 1, LENGTH // 2 :] = -100
    return {"input_ids": tokens[:, :-1], "labels": labels}


def train(layout, config, num_micro_batches, schedule, **options):
    """Two steps of SGD on this rank; returns what one process has, in whole tensors."""
    dp, pp, cp, tp = layout
    manager = setup_process_group_manager(tp_size=tp, cp_size=cp, pp_size=pp, dp_size=dp)
    options |= {"bucket_size": 3000, "schedule": schedule}
    model = parallelize(build(config), manager, **options, rehearse=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, gradients, norms, held = [], [], [], sorted(model.state_dict())
    for step in range(STEPS):
        micro_batches = shard_global_batch(global_batch(step), num_micro_batches, manager)
        loss = train_step(model, micro_batches)
        losses.append(loss.item())
        gradients.append(full_gradients(model))
        norms.append(global_grad_norm(model).item())
        optimizer.step()
        optimizer.zero_grad()
    result = losses, gradients, norms, full_state_dict(model), held
    destroy_process_group_manager()
    return result


def reference(config, num_micro_batches):
    """Two steps of the plain model in plain PyTorch."""
    model = build(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, gradients, norms = [], [], []
    for step in range(STEPS):
        batch = global_batch(step)
        logits = model(batch["input_ids"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        losses.append(loss.item())
        named = model.named_parameters(remove_duplicate=False)
        gradients.append({name: p.grad.clone() for name, p in named})
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients, norms, model.state_dict()


def assert_same(found, expected, what):
    assert set(found) == set(expected), what
    for name, tensor in expected.items():
        error = (found[name] - tensor).norm() / tensor.norm().clamp(min=1e-30)
        assert error < BOUND, f"{what} {name}: {error:.2e}"


def check(layout, config, num_micro_batches, schedule):
    results = run_ranks(
        train, torch.Size(layout).numel(), layout, config, num_micro_batches, schedule, timeout=200
    )
    compare(results, reference(config, num_micro_batches), layout)
    return results


def compare(results, expected, layout):
    losses, gradients, norms, weights = expected
    for rank, (found_losses, found_gradients, found_norms, found_weights, _) in enumerate(results):
        assert found_losses == pytest.approx(losses, rel=BOUND), rank
        assert found_norms == pytest.approx(norms, rel=BOUND), rank
        for found, expected in zip(found_gradients, gradients, strict=True):
            assert_same(found, expected, f"{layout} rank {rank} gradient")
        assert_same(found_weights, weights, f"{layout} rank {rank} weight")


def layouts(world_size):
    sizes_of_axis = [n for n in range(1, world_size + 1) if world_size % n == 0]
    every = itertools.product(sizes_of_axis, repeat=4)
    return [layout for layout in every if torch.Size(layout).numel() == world_size]


def label(layout):
    return "x".join(map(str, layout))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", layouts(1) + layouts(2) + layouts(4), ids=label)
def test_every_layout_of_1_2_and_4_ranks(layout, tied):
    check(layout, sizes(tied), num_micro_batches=2, schedule="1f1b")


def idle(layout, *arguments):
    """Train, once for each data-parallel rank while its gradients are thrown away."""

    def thrown_away(all_reduce, idle):
        def faulty(data, *args, **options):
            data.mul_(torch.distributed.get_rank() != idle)
            return all_reduce(data, *args, **options)

        return faulty

    results = []
    for rank in range(layout[0]):
        target = "parallel.data_parallel.buckets.reduction:all_reduce_flat"
        with patched(target, partial(thrown_away, idle=rank)):
            results.append(train(layout, *arguments))
    return results


@pytest.mark.parametrize("layout", [(2, 1, 1, 1), (4, 1, 1, 1)], ids=label)
def test_a_rank_that_does_nothing_is_noticed(layout):
    arguments = layout, sizes(False), 2, "1f1b"
    expected = reference(*arguments[1:3])
    for results in zip(*run_ranks(idle, layout[0], *arguments), strict=True):
        with pytest.raises(AssertionError):
            compare(results, expected, layout)


@pytest.mark.parametrize("schedule", ["1f1b", "afab", "interleaved_1f1b", "zb_v"])
def test_all_four_axes_at_once(schedule):
    check((2, 2, 2, 2), sizes(tied=True), num_micro_batches=2, schedule=schedule)


def test_three_stages_keep_all_eight_layers():
    results = check((1, 3, 1, 1), sizes(False, num_layers=8), num_micro_batches=4, schedule="1f1b")
    held = [name for *_, names in results for name in names]
    plain = Llama(sizes(False, num_layers=8)).state_dict()
    assert sorted(held) == sorted(plain)
    assert len({name.split(".")[1] for name in held if name.startswith("layers.")}) == 8
