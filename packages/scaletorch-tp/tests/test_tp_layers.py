"""Single layers against the plain ones, in one process and on ranks."""

import copy
import re
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import group

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    TensorParallelLayer,
    VocabParallelEmbedding,
    apply_tensor_parallel,
    explain,
    gather_tensors,
)

FEW = settings(max_examples=12, deadline=None, database=None, phases=[Phase.generate])


def shard(plain, style, **options):
    """Return this rank's shard of a copy of a plain layer."""
    holder = nn.ModuleList([copy.deepcopy(plain)])
    [layer] = apply_tensor_parallel(holder, {"0": style}, group.WORLD)
    vars(layer).update(options)
    return layer


def own(layer, tensor):
    return layer.cut.take(tensor, -1, layer.tp_rank)


def compare(layer, plain, x, whole_input=True, shard_of_output=False):
    """Outputs, gradients of the input and of every parameter, against the plain layer."""
    mine = x.clone()
    if mine.is_floating_point():
        mine = mine if whole_input else own(layer, mine).clone()
        mine.requires_grad_()
        x = x.clone().requires_grad_()
    kept = mine.detach().clone()
    out, expected = layer(mine), plain(x)
    torch.manual_seed(3)
    weight = torch.randn_like(expected)
    (expected * weight).sum().backward()
    if shard_of_output:
        expected, weight = (own(layer, t) for t in (expected, weight))
    (out * weight).sum().backward()
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    if mine.is_floating_point():
        grad = x.grad if whole_input else own(layer, x.grad)
        torch.testing.assert_close(mine.grad, grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(mine.detach(), kept)
    grads = gather_tensors(layer, {n: p.grad for n, p in layer.named_parameters()})
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-12)


def linear_layers(shape, out_features, bias):
    torch.manual_seed(1)
    plain = nn.Linear(shape[-1], out_features, bias, dtype=torch.float64)
    x = torch.randn(shape, dtype=torch.float64)
    for style in ("column", "column_gather"):
        for overlaps in (False, True):
            layer = shard(plain, style, async_all_reduce=overlaps)
            compare(layer, copy.deepcopy(plain), x, shard_of_output=style == "column")
    for style in ("row", "row_split"):
        compare(shard(plain, style), copy.deepcopy(plain), x, whole_input=style == "row_split")


@FEW
@given(
    tp=st.sampled_from([1, 2, 4]),
    leading=st.lists(st.integers(1, 3), max_size=3),
    features=st.tuples(st.integers(4, 11), st.integers(4, 11)),
    bias=st.booleans(),
)
def test_linear_layers_are_the_plain_one(tp, leading, features, bias):
    run_ranks(linear_layers, tp, (*leading, features[0]), features[1], bias)


class ScaledWordEmbedding(nn.Embedding):
    """As transformers has it for Gemma and BART."""

    def __init__(self, *sizes, scale=2.5, **options):
        super().__init__(*sizes, **options)
        self.embed_scale = scale

    def forward(self, ids):
        return super().forward(ids) * self.embed_scale


def embeddings(rows, dim, padding_idx, shape):
    torch.manual_seed(2)
    plain = nn.Embedding(rows, dim, padding_idx, dtype=torch.float64)
    scaled = ScaledWordEmbedding(rows, dim, scale=torch.tensor(2.5).double(), dtype=torch.float64)
    ids = torch.randint(0, rows, shape)
    if padding_idx is not None and ids.numel():
        ids.view(-1)[0] = padding_idx % rows
    for style, whole in (("vocab", plain), ("vocab", scaled), ("column_embedding", plain)):
        columns = style == "column_embedding"
        if columns and dim % dist.get_world_size():
            continue
        layer = shard(whole, style)
        compare(layer, copy.deepcopy(whole), ids, shard_of_output=columns)
        if padding_idx is not None and whole is plain:
            grad = gather_tensors(layer, {"weight": layer.weight.grad})["weight"]
            assert not grad[padding_idx].any()


@FEW
@given(
    tp=st.sampled_from([1, 2, 4]),
    rows=st.integers(4, 14),
    dim=st.integers(4, 6),
    padding=st.none() | st.integers(-4, 3),
    shape=st.lists(st.integers(0, 4), max_size=3),
)
def test_embeddings_are_the_plain_one(tp, rows, dim, padding, shape):
    run_ranks(embeddings, tp, rows, dim, padding, shape)


@pytest.mark.parametrize("kind", [nn.Embedding, ScaledWordEmbedding])
@pytest.mark.parametrize("option", ["max_norm", "sparse", "scale_grad_by_freq"])
def test_an_embedding_with_options_of_rows_is_refused(kind, option):
    model = nn.Sequential(kind(8, 4, **{option: True}))
    with pytest.raises(ValueError, match=f"it uses {option}, which is not supported on shards"):
        explain(model, 2, {"0": "vocab"})
    with pytest.raises(ValueError, match=f"it uses {option}|it is a ScaledWordEmbedding"):
        explain(model, 2, {"0": "column_embedding"})


def from_scratch():
    for kind, plain, sizes in (
        (ColumnParallelLinear, nn.Linear, (6, 8)),
        (RowParallelLinear, nn.Linear, (8, 6)),
        (VocabParallelEmbedding, nn.Embedding, (12, 3, -2)),
        (VocabParallelEmbedding, nn.Embedding, (6, 3)),
    ):
        torch.manual_seed(9)
        whole, then = plain(*sizes, dtype=torch.float64), torch.rand(2)
        torch.manual_seed(9)
        layer = kind(*sizes, dtype=torch.float64, group=group.WORLD)
        assert torch.equal(torch.rand(2), then)  # as many random numbers were drawn
        state = gather_tensors(layer, dict(layer.named_parameters()))
        assert list(state) == list(whole.state_dict())
        assert all(torch.equal(state[n], p) for n, p in whole.state_dict().items())
        assert layer.weight.untyped_storage().nbytes() * layer.tp_size == whole.weight.nbytes


@pytest.mark.parametrize("tp", [1, 2])
def test_new_layers_are_drawn_as_in_one_process(tp):
    run_ranks(from_scratch, tp)


def test_layers_are_plain_without_torch_distributed():
    torch.manual_seed(0)
    layer = ColumnParallelLinear(3, 5, gather_output=True)
    torch.manual_seed(0)
    plain = nn.Linear(3, 5)
    x = torch.randn(2, 3)
    assert layer.tp_size == 1
    assert layer.group is None
    assert torch.equal(layer(x), plain(x))
    row = apply_tensor_parallel(copy.deepcopy(plain), {"": "row"})
    assert torch.equal(row(x), plain(x))
    ids = torch.tensor([0, 4])
    table = nn.Embedding(5, 2)
    layer = apply_tensor_parallel(copy.deepcopy(table), {"": "vocab"})
    assert torch.equal(layer(ids), table(ids))


@distributed_test(world_size=2)
def test_shards_keep_what_the_plain_layer_was():
    plain = nn.Linear(4, 8, dtype=torch.bfloat16).eval().requires_grad_(False)
    plain.bias.requires_grad_()
    plain.weight.note = "kept"
    plain.bias.grad = torch.arange(8, dtype=torch.bfloat16)
    calls = []
    plain.register_forward_hook(lambda *_: calls.append("hook"))
    grad = plain.bias.grad
    layer = apply_tensor_parallel(plain, {"": "column"}, group.WORLD)
    assert layer.weight.dtype == torch.bfloat16
    assert not layer.training
    assert not layer.weight.requires_grad
    assert layer.bias.requires_grad
    assert layer.weight.note == "kept"
    assert torch.equal(layer.bias.grad, grad.chunk(2)[layer.tp_rank])
    layer(torch.ones(1, 4, dtype=torch.bfloat16))
    assert calls == ["hook"]
    meta = VocabParallelEmbedding(8, 4, group=group.WORLD, device="meta")
    assert meta.weight.shape == (4, 4)
    assert meta.weight.device.type == "meta"
    row = nn.Linear(4, 8)
    bias = row.bias
    assert apply_tensor_parallel(row, {"": "row"}, group.WORLD).bias is bias


@distributed_test(world_size=2)
def test_tied_parameters_stay_tied_also_in_copies():
    table, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight = table.weight
    plan = {"0": "vocab", "1": "column"}
    layers = apply_tensor_parallel(nn.ModuleList([table, head]), plan, group.WORLD)
    assert layers[0].weight is layers[1].weight
    pair = copy.deepcopy(layers)
    assert pair[0].weight is pair[1].weight
    assert pair[0].weight is not layers[0].weight
    assert pair[0].group is group.WORLD


REFUSED = [  # a layer's arguments, the shape of an input, and what is said
    (ColumnParallelLinear, (4, 3), None, "out_features = 3 has no share for each of tp = 4 ranks; "
     "tp sizes up to 3 are legal"),
    (RowParallelLinear, (1, 4), None, "in_features = 1 has no share for each of tp = 4 ranks"),
    (VocabParallelEmbedding, (3, 4), None, "num_embeddings = 3 has no share for each of tp = 4"),
    (ColumnParallelLinear, (4, 8), (2, 3), "expected an input of last dim 4, got one of shape (2, "
     "3)"),
    (RowParallelLinear, (8, 4), (2, 8), "RowParallelLinear(input_is_parallel=True) expected an "
     "input of last dim 2, got one of shape (2, 8)"),
]  # fmt: skip


@distributed_test(world_size=4)
def test_bad_arguments_say_what_would_do():
    for kind, arguments, shape, text in REFUSED:
        build = partial(kind, *arguments, group=group.WORLD)
        call = build if shape is None else partial(build(), torch.ones(shape))
        with pytest.raises(ValueError, match=re.escape(text)) as caught:
            call()
        assert shape is None or f"rank {group.WORLD.rank()}" in str(caught.value)
    with pytest.raises(RuntimeError, match="pass group="):
        ColumnParallelLinear(4, 8)


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class FalconLinear(nn.Linear):
    def forward(self, x):
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias


def odd_modules():
    replaced, hooked, parametrized = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    replaced.forward = lambda x: x
    hooked.weight.register_hook(lambda g: g)
    nn.utils.parametrizations.weight_norm(parametrized)
    unusual = nn.Linear(4, 4)
    unusual.scale = nn.Parameter(torch.ones(4))
    buffered = nn.Linear(4, 4)
    weight = buffered._parameters.pop("weight")
    buffered.register_buffer("weight", weight.detach())
    return {
        "its forward was replaced": replaced,
        "its weight has gradient hooks": hooked,
        "it is a ParametrizedLinear": parametrized,
        "its parameters are": unusual,
        "it is a Scaled": Scaled(4, 4),
        "its weight is not a parameter": buffered,
    }


@pytest.mark.parametrize("reason", odd_modules())
def test_modules_whose_computation_is_their_own_are_refused(reason):
    module = odd_modules()[reason]
    with pytest.raises(ValueError, match=reason):
        apply_tensor_parallel(module, {"": "column"})
    assert not isinstance(module, TensorParallelLayer)
    assert ColumnParallelLinear.takes(FalconLinear(3, 2))  # the same in other words


@pytest.mark.parametrize("ids", [[-1], [8], [0, 99]])
@distributed_test(world_size=2)
def test_an_id_outside_the_table_fails_on_every_rank(ids):
    table = VocabParallelEmbedding(8, 2, group=group.WORLD)
    with pytest.raises(IndexError):
        table(torch.tensor(ids))
