"""The vocabulary-parallel cross entropy against torch's, in one process and on ranks."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch.distributed import group
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from scaletorch.dist.errors import InvalidArgumentError, StateError
from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.placement import shard_sizes
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, vocab_parallel_cross_entropy
from scaletorch.parallel.tensor_parallel import cross_entropy as module

FEW = settings(max_examples=25, deadline=None, database=None, phases=[Phase.generate])
IGNORED = -100


def place():
    """This rank, the number of ranks, and the group to pass."""
    if not dist.is_initialized():
        return 0, 1, None
    return dist.get_rank(), dist.get_world_size(), group.WORLD


def shard_of(whole, lengths, rank):
    return whole.narrow(-1, sum(lengths[:rank]), lengths[rank])


def reference(logits, targets, *, z_loss=0.0, reduction="mean", **options):
    """Torch's loss of whole logits, with the z-loss written out."""
    flat, ids = logits.flatten(0, -2), targets.flatten()
    losses = F.cross_entropy(flat, ids, reduction="none", **options)
    valid = ids != options.get("ignore_index", IGNORED)
    if z_loss:
        losses = losses + z_loss * flat.logsumexp(-1).square().masked_fill(~valid, 0)
    if reduction == "none":
        return losses.view(targets.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / valid.sum()


def both(logits, targets, lengths=None, **options):
    """Loss and gradient of this rank's shard: ours, and torch's in float64 on the whole."""
    rank, size, where = place()
    vocab = logits.shape[-1]
    extra = {"vocab_size": vocab} if lengths is None else {}
    lengths = shard_sizes(vocab, size) if lengths is None else lengths
    mine = shard_of(logits, lengths, rank).clone().requires_grad_()
    kept = mine.detach().clone()
    whole = logits.double().clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, targets, group=where, **extra, **options)
    expected = reference(whole, targets, **options)
    torch.manual_seed(5)
    weight = torch.rand_like(expected)
    (loss * weight.to(loss.dtype)).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(mine.detach(), kept, rtol=0, atol=0, equal_nan=True)
    assert mine.grad.dtype == mine.dtype
    assert loss.dtype == (torch.float64 if mine.dtype == torch.float64 else torch.float32)
    return loss.detach(), mine.grad, expected.detach(), shard_of(whole.grad, lengths, rank)


def agree(got, grad, loss, whole_grad, tolerance=1e-12):
    torch.testing.assert_close(got.double(), loss, rtol=tolerance, atol=tolerance, equal_nan=True)
    torch.testing.assert_close(
        grad.double(), whole_grad, rtol=tolerance, atol=tolerance, equal_nan=True
    )


def draw(vocab, shape=(3, 4), ignored=0.3, scale=3.0, dtype=torch.float64, seed=1):
    torch.manual_seed(seed)
    logits = (torch.randn(*shape, vocab, dtype=torch.float64) * scale).to(dtype)
    targets = torch.randint(vocab, shape)
    return logits, targets.masked_fill(torch.rand(shape) < ignored, IGNORED)


def every_option():
    for reduction, smoothing, z, share, vocab in itertools.product(
        ("none", "sum", "mean"), (0.0, 0.1, 1.0), (0.0, 1e-2), (0.0, 0.4, 1.0), (13, 24)
    ):
        logits, targets = draw(vocab, ignored=share)
        options = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": z}
        agree(*both(logits, targets, **options))
    logits, targets = draw(13, ignored=0)
    agree(*both(logits, targets.masked_fill(targets == 5, 2), ignore_index=2))
    agree(*both(logits.float(), targets), tolerance=2e-6)


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_loss_and_gradient_are_those_of_torch(size):
    run_ranks(every_option, size) if size else every_option()


@distributed_test(world_size=3)
def test_shards_of_any_length():
    for lengths, smoothing in itertools.product([(5, 1, 7), (0, 13, 0), (6, 0, 7)], (0.0, 0.2)):
        agree(*both(*draw(13), list(lengths), label_smoothing=smoothing, z_loss=1e-3))
    agree(*both(*draw(2, shape=(5,)), label_smoothing=0.1))  # fewer ids than ranks


@distributed_test(world_size=2)
def test_drawn_shapes_divisions_and_blocks():
    @seed(7)  # all ranks must draw alike
    @FEW
    @given(
        vocab=st.integers(1, 40),
        shape=st.lists(st.integers(0, 4), min_size=1, max_size=3),
        block=st.sampled_from([1, 7, 64, 2**17]),
        cuts=st.lists(st.integers(0, 40), min_size=1, max_size=1),
        smoothing=st.sampled_from([0.0, 0.3]),
        reduction=st.sampled_from(["none", "sum", "mean"]),
        start=st.integers(0, 99),
    )
    def check(vocab, shape, block, cuts, smoothing, reduction, start):
        before, module.BLOCK = module.BLOCK, block
        try:
            cut = min(cuts[0], vocab)
            case = draw(vocab, shape, seed=start)
            options = {"label_smoothing": smoothing, "reduction": reduction, "z_loss": 0.01}
            agree(*both(*case, [cut, vocab - cut], **options))
        finally:
            module.BLOCK = before

    check()


@distributed_test(world_size=2)
def test_large_logits_lose_nothing():
    logits, targets = draw(24, dtype=torch.float32)
    logits = (logits + 1e4).float()
    agree(*both(logits, targets, label_smoothing=0.1), tolerance=3e-6)
    agree(*both(logits - 2e4, targets), tolerance=3e-6)
    logits[..., 12:] -= 2e4  # the exponentials of one shard vanish
    agree(*both(logits, targets.clamp_max(11), label_smoothing=0.1), tolerance=3e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@distributed_test(world_size=2)
def test_sixteen_bits_are_no_worse_than_in_one_process(dtype):
    for smoothing, z in ((0.0, 0.0), (0.1, 1e-3)):
        logits, targets = draw(1013, shape=(64,), dtype=dtype)
        options = {"label_smoothing": smoothing, "z_loss": z}
        loss, grad, expected, whole_grad = both(logits, targets, **options)
        plain = logits.clone().requires_grad_()
        theirs = reference(plain, targets, **options)
        theirs.backward()
        rank, size, _ = place()
        shard = shard_of(plain.grad, shard_sizes(1013, size), rank)

        def error(x, y):
            return (x.double() - y).norm().item()

        assert error(loss, expected) <= 1.25 * error(theirs, expected)
        assert error(loss, expected) <= 1e-5 * expected.abs().item()
        # 16-bit ranks see the weight of the loss in float32: at most one process's error.
        torch.manual_seed(5)
        weight = torch.rand((), dtype=torch.float64)
        assert error(grad, whole_grad) <= 1.25 * error(shard.double() * weight, whole_grad)


@distributed_test(world_size=3)
def test_what_is_not_finite_is_as_in_torch_on_every_rank():
    inf = math.inf
    for column, value in itertools.product((0, 7, 12), (math.nan, inf, -inf)):
        for reduction, smoothing in itertools.product(("none", "mean"), (0.0, 0.1)):
            logits, targets = draw(13, ignored=0)
            logits[0, 1, column] = value
            targets[0, 1] = 3
            case = both(logits, targets, reduction=reduction, label_smoothing=smoothing)
            agree(*case)
            if reduction == "none" and value != -inf:
                assert case[0].isnan().sum() == 1
    logits, targets = draw(13, ignored=0)
    logits[1, 1] = -inf  # nothing is possible
    logits[2, 2, 5:] = -inf  # nor anything of the last shards, as of a padded vocabulary
    logits[2, 3, :9] = -inf
    targets[2] = torch.tensor([0, 12, 1, 12])
    agree(*both(logits, targets, reduction="none"))
    logits[1, 0, 4] = math.nan
    targets[1] = IGNORED
    loss, _, expected, _ = both(logits, targets)
    assert loss.isfinite()
    torch.testing.assert_close(loss, expected)


@distributed_test(world_size=3)
def test_every_rank_has_the_same_bits():
    logits, targets = draw(23, dtype=torch.float32)
    loss = both(logits, targets, reduction="none")[0]
    shards = [torch.empty_like(loss) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, loss)
    assert all(torch.equal(each, loss) for each in shards)


def other_uses():
    rank, size, where = place()
    whole, targets = draw(13)
    mine = shard_of(whole, shard_sizes(13, size), rank)

    def loss(x, ids=targets):
        return vocab_parallel_cross_entropy(x, ids, group=where, vocab_size=13)

    def grad(run):
        x = mine.clone().requires_grad_()
        run(x).backward()
        return x.grad

    plain = grad(loss)
    # Recomputation, both forms, and use for two losses at once.
    for reentrant in (True, False):
        assert torch.equal(grad(lambda x, r=reentrant: checkpoint(loss, x, use_reentrant=r)), plain)
    torch.testing.assert_close(grad(lambda x: loss(x) + 2 * loss(x)), 3 * plain)
    # Backward twice through one graph.
    x = mine.clone().requires_grad_()
    result = loss(x)
    result.backward(retain_graph=True)
    result.backward()
    torch.testing.assert_close(x.grad, 2 * plain)
    # Nothing to differentiate.
    assert not loss(mine).requires_grad
    with torch.no_grad():
        assert not loss(x).requires_grad
    # Not contiguous, and a batch that a causal model's shift makes so.
    base = mine.transpose(0, 1).contiguous().requires_grad_()
    loss(base.transpose(0, 1)).backward()
    torch.testing.assert_close(base.grad.transpose(0, 1), plain)
    base = torch.cat([mine, mine[:, :1]], 1).requires_grad_()
    loss(base[:, :-1]).backward()
    torch.testing.assert_close(base.grad[:, :-1], plain)
    # One token, and none.
    one = loss(mine[0, 0], targets[0, 0].clamp_min(0))
    torch.testing.assert_close(one, F.cross_entropy(whole[0, 0], targets[0, 0].clamp_min(0)))
    none = mine[:0].clone().requires_grad_()
    assert loss(none, targets[:0]).isnan()
    loss(none, targets[:0]).backward()
    assert none.grad.shape == none.shape
    # A second derivative is refused, not wrong.
    x = mine.clone().requires_grad_()
    with pytest.raises(StateError, match="differentiated again; call backward without create"):
        torch.autograd.grad(loss(x), x, create_graph=True)
    # Logits changed in between are noticed.
    x = mine.clone().requires_grad_()
    y = x * 1
    result = loss(y)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


@pytest.mark.parametrize("size", [1, 2])
def test_other_uses(size):
    run_ranks(other_uses, size)


@pytest.mark.parametrize("autocast", [False, True])
@distributed_test(world_size=2)
def test_behind_a_column_parallel_head(autocast):
    _, _, where = place()
    torch.manual_seed(2)
    head = torch.nn.Linear(8, 26, dtype=torch.float32 if autocast else torch.float64)
    hidden = torch.randn(6, 8, dtype=head.weight.dtype)
    targets = torch.randint(26, (6,))
    x, y = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    layer = apply_tensor_parallel(copy.deepcopy(head), {"": "column"}, where)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = vocab_parallel_cross_entropy(layer(x), targets, group=where)
        expected = F.cross_entropy(head(y), targets)
    loss.backward()
    expected.backward()
    tolerance = 2e-2 if autocast else 1e-12
    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=0)
    torch.testing.assert_close(x.grad, y.grad, rtol=tolerance, atol=tolerance / 10)


def communicated():
    rank, size, where = place()
    whole, targets = draw(13, dtype=torch.bfloat16)
    mine = shard_of(whole, shard_sizes(13, size), rank).clone().requires_grad_()
    sent, real = [], module.all_gather

    def counted(data, members):
        sent.append((tuple(data.shape), data.dtype))
        return real(data, members)

    module.all_gather = counted
    try:
        for extra, smoothing in itertools.product(({"vocab_size": 13}, {}), (0.0, 0.1)):
            sent.clear()
            vocab_parallel_cross_entropy(
                mine, targets, group=where, label_smoothing=smoothing, **extra
            ).backward()
            numbers = ((4 if smoothing else 3, *targets.shape), torch.float32)
            lengths = [] if extra else [((1,), torch.int64)]
            assert sent == ([*lengths, numbers] if size > 1 else [])
    finally:
        module.all_gather = real


@pytest.mark.parametrize("size", [1, 2])
def test_one_collective_of_a_few_float32_numbers_a_token(size):
    run_ranks(communicated, size)


class Sizes(TorchDispatchMode):
    """Notes the dtype and length of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.made = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.made.add((result.dtype, result.numel()))
        return result


def test_what_is_made_and_kept(monkeypatch):
    """Of the logits' size: the gradient, once, in their dtype; kept: the logits themselves."""
    monkeypatch.setattr(module, "BLOCK", 256)
    logits, targets = draw(64, shape=(5, 16), dtype=torch.bfloat16)
    logits.requires_grad_()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss = vocab_parallel_cross_entropy(logits, targets, label_smoothing=0.1, z_loss=1e-3)
    assert [t.data_ptr() for t in kept if t.numel() > 80] == [logits.data_ptr()]
    with Sizes() as sizes:
        loss = vocab_parallel_cross_entropy(logits, targets, label_smoothing=0.1, z_loss=1e-3)
        assert max(length for _, length in sizes.made) == 4 * 80  # the numbers that travel
        sizes.made.clear()
        loss.backward()
    large = {(dtype, length) for dtype, length in sizes.made if length > 256}
    assert large == {(torch.bfloat16, 5 * 16 * 64)}


def refused():
    rank, size, where = place()
    whole, targets = draw(13, ignored=0)
    mine = shard_of(whole, shard_sizes(13, size), rank)
    for bad in (13, -1, -99):
        wrong = targets.clone()
        wrong[1, 2] = bad
        message = rf"rank {rank}: .* ids from 0 to 12 or ignore_index = -100, got {bad};"
        for extra in ({}, {"vocab_size": 13}):
            with pytest.raises(InvalidArgumentError, match=message):
                vocab_parallel_cross_entropy(mine, wrong, group=where, **extra)
    with pytest.raises(InvalidArgumentError, match=r"vocabulary of 20 over tp = . this rank's"):
        vocab_parallel_cross_entropy(mine, targets, group=where, vocab_size=20)
    dist.barrier()  # nobody waits in a collective


@pytest.mark.parametrize("size", [1, 2])
def test_bad_targets_are_refused_on_every_rank_before_anything_is_sent(size):
    run_ranks(refused, size)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reduction": "max"}, r"reduction must be one of \('none', 'sum', 'mean'\), got 'max'"),
        ({"label_smoothing": 1.5}, r"label_smoothing must be from 0 to 1, got 1\.5"),
        ({"label_smoothing": math.nan}, r"label_smoothing must be from 0 to 1, got nan"),
        ({"z_loss": -1.0}, r"z_loss must be finite and not negative, got -1\.0"),
        ({"logits": torch.zeros(2, 3).long()}, r"floating-point logits .* torch\.int64"),
        ({"logits": torch.tensor(1.0)}, r"logits \[\.\.\., V_local\], got torch\.float32 of shape"),
        ({"targets": torch.zeros(2)}, r"int64 targets of shape \(2,\) .* got torch\.float32"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"targets of shape \(2,\) .* \(3,\)"),
        (
            {"targets": torch.zeros(2, device="meta").long()},
            "on cpu need .* there, got .* on meta",
        ),
    ],
)
def test_bad_arguments(change, message):
    call = {"logits": torch.zeros(2, 5), "targets": torch.zeros(2, dtype=torch.int64)} | change
    with pytest.raises(InvalidArgumentError, match=message):
        vocab_parallel_cross_entropy(call.pop("logits"), call.pop("targets"), **call)
