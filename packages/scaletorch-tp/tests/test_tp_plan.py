"""Plans: patterns, and every mistake found before anything changes."""

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import group

from scaletorch.dist.testing import distributed_test, run_ranks
from scaletorch.parallel.pg_manager.building import matching
from scaletorch.parallel.placement import shard_sizes
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    Divide,
    RowParallelLinear,
    apply_tensor_parallel,
)
from scaletorch.parallel.tensor_parallel.plans.attention import head_cuts
from scaletorch.parallel.tensor_parallel.plans.resolve import resolve

NAMES = ["", "model", "model.layers.0.mlp.up", "model.layers.11.mlp.up", "layers.0.mlp.up", "up"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", [""]),
        ("*", ["model", "up"]),
        ("**", NAMES),
        ("**.up", NAMES[2:]),
        ("layers.*.mlp.up", ["layers.0.mlp.up"]),
        ("**.layers.?.mlp.up", ["model.layers.0.mlp.up", "layers.0.mlp.up"]),
        ("model.**.up", NAMES[2:4]),
        ("model.*.up", []),
        ("mod*.layers.1*.**", ["model.layers.11.mlp.up"]),
        ("u.", []),
        (".*", []),
        ("(up", []),
    ],
)
def test_patterns_of_dotted_names(pattern, expected):
    assert matching(pattern, NAMES) == expected


PARTS = st.lists(st.text("ab.*?[(", min_size=1).filter(lambda s: "." not in s), max_size=4)


@settings(deadline=None)
@given(PARTS)
def test_a_name_matches_itself_and_everything_matches_two_stars(parts):
    name = ".".join(p.replace("*", "s").replace("?", "q") for p in parts)
    assert matching(name, [name, name + "x"]) == [name]
    assert matching("**", [name]) == [name]


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 20))
def test_shards_cover_the_length_in_order(length, size):
    sizes = shard_sizes(length, size)
    assert len(sizes) == size
    assert sum(sizes) == length
    assert sizes == tuple(sorted(sizes, reverse=True))
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 40))
def test_every_rank_has_the_key_value_heads_that_its_queries_use(key_values, groups, tp):
    tp = min(tp, key_values * groups)
    query, key_value = head_cuts(key_values * groups, key_values, tp)
    assert (query.whole, key_value.whole) == (key_values * groups, key_values)
    assert not query.replicated
    assert key_value.replicated == (key_values < tp)
    for rank, (q, kv) in enumerate(zip(query.sizes, key_value.sizes, strict=True)):
        assert q > 0
        assert q % kv == 0
        for head in range(q):  # as scaled_dot_product_attention pairs them
            used = (query.start(rank) + head) // groups
            assert used == key_value.start(rank) + head // (q // kv)
    assert all(key_value.sizes[owner] for rank in range(tp) for owner in key_value.owners(rank))


class Attention(nn.Module):
    def __init__(self, heads=4, kv_heads=2, head_dim=2, hidden=8):
        super().__init__()
        self.num_heads, self.num_kv_heads = heads, kv_heads
        self.q_proj = nn.Linear(hidden, heads * head_dim)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim)
        self.o_proj = nn.Linear(heads * head_dim, hidden)


class Block(nn.Module):
    def __init__(self, **sizes):
        super().__init__()
        self.self_attn = Attention(**sizes)
        self.mlp = nn.ModuleDict(
            {"gate_proj": nn.Linear(8, 16), "up_proj": nn.Linear(8, 16)}
            | {"down_proj": nn.Linear(16, 8)}
        )


class Model(nn.Module):
    _tp_plan = {  # noqa: RUF012
        **{f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        "layers.*.self_attn.o_proj": "rowwise",
        **{f"layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")},
        "layers.*.mlp.down_proj": "rowwise",
        "embed_tokens": "embedding_rowwise",
        "lm_head": "colwise_gather_output",
    }

    def __init__(self, tied=False, **sizes):
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(**sizes) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 16, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


def refuse(model, plan, tp, *texts):
    """The mistake is found for any tp without ranks, and leaves the model alone."""
    before = {n: (type(m), dict(m._parameters)) for n, m in model.named_modules()}
    attributes = {n: m.num_heads for n, m in model.named_modules() if hasattr(m, "num_heads")}
    with pytest.raises(ValueError, match=re.escape(texts[0])) as caught:
        resolve(model, plan, tp)
    for text in texts:
        assert text in str(caught.value)
    assert before == {n: (type(m), dict(m._parameters)) for n, m in model.named_modules()}
    for name, count in attributes.items():
        assert model.get_submodule(name).num_heads == count


UP = {"**.up_proj": "column"}


@pytest.mark.parametrize(
    ("plan", "texts"),
    [
        (UP | {"layers.*.self_atn.q_proj": "column"}, ("matches no module", "self_attn.q_proj")),
        (UP | {"**.mlp.*": "column"}, ("two patterns", "'layers.0.mlp.up_proj'", "'**.up_proj'")),
        ({"**.q_proj": "colwise"}, ("unknown style 'colwise'", "'column_gather'", "Divide")),
        ({"**.q_proj": None}, ("unknown style None",)),
        ({"norm": "column"}, ("module 'norm'", "it is a LayerNorm")),
        ({"embed_tokens": "row"}, ("it is a Embedding, not a Linear",)),
        ({"lm_head": "vocab"}, ("it is a Linear, not a Embedding",)),
        ({"": "column"}, ("it is a Model",)),
        ({"**.self_attn": Divide("num_heads", "heads")}, ("cannot divide heads", "'num_kv_heads'")),
        ({"**.self_attn": Divide("training")}, ("cannot divide training",)),
        ({"**.q_proj": "column"}, ("tp = 3", "layers.0.self_attn.q_proj.out_features = 8")),
        (
            {"**.self_attn": Divide("num_heads", "num_kv_heads"), "**.up_proj": "column"},
            ("tp = 3", "num_heads = 4", "the nearest legal tp sizes are 2"),
        ),
    ],
)
def test_mistakes_in_a_plan(plan, texts):
    refuse(Model(), plan, 3, *texts)


def test_divide_names_something():
    with pytest.raises(ValueError, match="attribute names"):
        Divide()
    with pytest.raises(ValueError, match="attribute names"):
        Divide(4)


@pytest.mark.parametrize("plan", [{"embed_tokens": "vocab"}, {"lm_head": "column"}])
def test_a_tie_that_would_break_is_refused(plan):
    refuse(Model(tied=True), plan, 2, "one tied parameter", "'embed_tokens.weight'", "replicates")
    row = plan | {"embed_tokens": "vocab", "lm_head": "row"}
    refuse(Model(tied=True), row, 2, "one tied parameter", "dim 0", "dim 1")


def test_heads_are_counted_also_where_the_module_has_no_counts():
    refuse(Model(), None, 5, "tp = 5 leaves ranks without", "query heads of layers.0.self_attn = 4")
    refuse(Model(), None, 5, "for this model and plan tp sizes up to 4 are legal")
    odd = Model(heads=4, kv_heads=3)
    refuse(odd, None, 4, "layers.0.self_attn' are not understood as heads", "a multiple of")
    resolve(odd, None, 1)  # one rank has all heads
    model = Model()
    for block in model.layers:
        del block.self_attn.num_heads, block.self_attn.num_kv_heads
    refuse(model, None, 2, "are not understood as heads", "pass a plan of your own")
    for block in model.layers:
        block.self_attn.head_dim = 2
    refuse(model, None, 5, "query heads of layers.0.self_attn = 4")
    for block in model.layers:
        block.self_attn.head_dim = 3
    refuse(model, None, 2, "are not understood as heads")


def test_a_model_without_a_plan_is_told_how_to_get_one():
    far = nn.Sequential(nn.Linear(2, 2))
    refuse(far, None, 4, "Sequential has no plan", "suggest_plan(model, ex", "or write one")


def test_a_model_may_come_without_its_head():
    model = Model()
    del model.lm_head
    apply_tensor_parallel(model)
    assert isinstance(model.layers[0].self_attn.q_proj, ColumnParallelLinear)
    assert isinstance(model.layers[0].self_attn.o_proj, RowParallelLinear)
    with pytest.raises(ValueError, match="it is a ColumnParallelLinear"):
        apply_tensor_parallel(model)


@distributed_test(world_size=2)
def test_the_model_itself_is_rewritten_with_its_hooks_and_owners():
    root = nn.Linear(4, 8)
    calls = []
    handle = root.register_forward_hook(lambda *_: calls.append("hook"))
    plain = copy.deepcopy(nn.Linear(4, 8))
    plain.load_state_dict(root.state_dict())
    assert apply_tensor_parallel(root, {"": "column_gather"}, group.WORLD) is root
    assert isinstance(root, ColumnParallelLinear)
    x = torch.randn(2, 4)
    torch.testing.assert_close(root(x), plain(x))
    assert calls == ["hook"]
    handle.remove()
    root(x)
    assert calls == ["hook"]

    shared = nn.Linear(4, 8)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    apply_tensor_parallel(model, {"a": "column"}, group.WORLD)
    assert model["b"][0] is model["a"] is shared
    assert shared.weight.shape == (4, 4)
    assert shared.bias.shape == (4,)


def message_of_a_typo():
    model = Model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="matches no module") as caught:
        apply_tensor_parallel(model, {"**.up_proj": "column", "**.dwn_proj": "row"}, group.WORLD)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    with pytest.raises(ValueError, match="tp = 2 leaves ranks without a share"):
        apply_tensor_parallel(Model(heads=1, kv_heads=1), None, group.WORLD)
    return str(caught.value)


def test_the_same_error_on_every_rank():
    assert len(set(run_ranks(message_of_a_typo, 2))) == 1
