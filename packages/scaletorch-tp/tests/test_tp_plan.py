"""Plans: patterns, every mistake found before anything changes, and their explanation."""

import dataclasses
import json
import re
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import CountingAttention, make
from torch import nn
from torch.distributed import group

from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pg_manager.building import matching
from scaletorch.parallel.tensor_parallel import (
    ColumnParallelLinear,
    Divide,
    apply_tensor_parallel,
    explain,
)
from scaletorch.parallel.tensor_parallel.plans.attention import head_cuts

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


model = partial(make, heads=4, kv_heads=2, vocab=16, hidden=8, inner=16)
counting = partial(model, attention=CountingAttention)
tied = partial(counting, tied=True)


def with_head_dim(size):
    made = model()
    for block in made.layers:
        block.self_attn.head_dim = size
    return made


def with_a_count():
    made = model()
    made.layers[0].count = 6
    return made


def tied_projections():
    made = make(heads=6, kv_heads=6, hidden=24)
    made.layers[0].mlp.down_proj = nn.Linear(24, 24, bias=False)
    made.layers[0].mlp.down_proj.weight = made.layers[0].self_attn.o_proj.weight
    return made


UP, HEADS, COUNT = {"**.up_proj": "column"}, Divide("num_heads", "num_kv_heads"), Divide("count")
TABLE, ROW = {"embed_tokens": "vocab"}, {"lm_head": "row"}
REFUSED = [  # a model, its plan, the number of ranks, and what is said
    (counting, UP | {"layers.*.self_atn.q_proj": "column"}, 3,
     "matches no module", "self_attn.q_proj"),
    (counting, UP | {"**.mlp.*": "column"}, 3,
     "two patterns", "'layers.0.mlp.up_proj'", "'**.up_proj'"),
    (counting, {"**.q_proj": "colwise"}, 3,
     "unknown style 'colwise'", "'column_gather'", "Divide"),
    (counting, {"**.q_proj": None}, 3, "unknown style None"),
    (counting, {"norm": "column"}, 3, "module 'norm'", "it is a RMSNorm"),
    (counting, {"embed_tokens": "row"}, 3, "it is a Embedding, not a Linear"),
    (counting, {"lm_head": "vocab"}, 3, "it is a Linear, not a Embedding"),
    (counting, {"": "column"}, 3, "it is a Llama"),
    (counting, {"**.self_attn": Divide("num_heads", "heads")}, 3,
     "cannot divide heads", "'num_kv_heads'"),
    (counting, {"**.self_attn": Divide("training")}, 3, "cannot divide training"),
    (counting, {"**.q_proj": "column"}, 3, "layers.0.self_attn.q_proj.out_features = 16"),
    (counting, {"**.self_attn": HEADS, "**.up_proj": "column"}, 3,
     "num_heads = 4", "tp sizes up to 2 that divide 2 are legal"),
    (tied, TABLE, 2, "one tied parameter", "'embed_tokens.weight'", "replicates"),
    (tied, {"lm_head": "column"}, 2, "one tied parameter", "'embed_tokens.weight'", "replicates"),
    (tied, TABLE | ROW, 2, "one tied parameter", "dim 0", "dim 1"),
    (tied_projections, None, 4, "one tied parameter", "into 8, 8, 4, 4", "into 6, 6, 6, 6"),
    (model, None, 5, "tp = 5 leaves ranks without", "query heads of layers.0.self_attn = 4",
     "for this model and plan tp sizes up to 4 are legal"),
    (partial(counting, kv_heads=3), None, 4,
     "layers.0.self_attn' are not understood as heads", "a multiple of"),
    (partial(with_head_dim, 3), None, 2,
     "are not understood as heads", "pass a plan of your own"),
    (partial(model, vocab=4), None, 5,
     "embed_tokens.num_embeddings = 4", "sizes up to 4 are legal"),
    (partial(model, inner=3), None, 4, "mlp.gate_proj.out_features = 3", "and 2 more", "up to 3"),
    (model, {"**.self_attn.q_proj": "column"}, 5, "q_proj.out_features = 16"),
    (with_a_count, {"layers.0": COUNT}, 4, "tp = 4 does not divide layers.0.count = 6"),
    (with_a_count, TABLE | {"layers.0": COUNT}, 17,
     "count = 6 and leaves ranks", "tp sizes up to 6 that divide 6 are legal"),
    (lambda: nn.Sequential(nn.Linear(2, 2)), None, 4,
     "Sequential has no plan", "suggest_plan(model, ex", "or write one"),
]  # fmt: skip


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[3])
def test_a_mistake_is_found_without_ranks_and_leaves_the_model_alone(case):
    build, plan, tp, *texts = case
    model = build()
    before = {n: (type(m), dict(vars(m))) for n, m in model.named_modules()}
    with pytest.raises(ValueError, match=re.escape(texts[0])) as caught:
        explain(model, tp, plan)
    for text in texts:
        assert text in str(caught.value)
    assert before == {n: (type(m), dict(vars(m))) for n, m in model.named_modules()}


@pytest.mark.parametrize("names", [(), (4,)])
def test_divide_names_something(names):
    with pytest.raises(ValueError, match="attribute names"):
        Divide(*names)


def test_a_model_may_come_without_its_head():
    made = model()
    del made.lm_head
    styles = {each.name: each.style for each in explain(made, 2).parameters}
    assert styles["layers.0.self_attn.q_proj.weight"] == "column"
    assert styles["layers.0.self_attn.o_proj.weight"] == "row"


def test_a_sharded_layer_is_not_sharded_again():
    with pytest.raises(ValueError, match="it is a ColumnParallelLinear"):
        explain(nn.Sequential(ColumnParallelLinear(4, 4)), 2, {"0": "column"})


@distributed_test(world_size=2)
def test_the_model_itself_is_rewritten_with_its_hooks_and_owners():
    root = nn.Linear(4, 8)
    calls = []
    handle = root.register_forward_hook(lambda *_: calls.append("hook"))
    plain = nn.Linear(4, 8)
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


def test_an_explanation_is_plain_data_and_a_table_with_one_line_for_equal_layers():
    told = explain(model(vocab=13), 2)
    data = json.loads(json.dumps(dataclasses.asdict(told)))
    assert data["tp"] == 2
    assert data["parameters"][0] == {
        "name": "embed_tokens.weight",
        "style": "vocab",
        "shape": [13, 8],
        "dim": 0,
        "local_shapes": [[7, 8], [6, 8]],
    }
    lines = str(told).splitlines()
    q_proj = [line.split() for line in lines if "q_proj.weight" in line]
    expected = "layers.*.self_attn.q_proj.weight column 16 x 8 8 x 8 2"
    assert [" ".join(line) for line in q_proj] == [expected]
    assert any("embed_tokens.weight" in line and "7 x 8 or 6 x 8" in line for line in lines)


def test_parameters_need_no_memory():
    with torch.device("meta"):
        hollow = model()
    assert explain(hollow, 4) == explain(model(), 4)


@pytest.mark.parametrize("tp", [0, -1, 2.0, True, "2"])
def test_a_number_of_ranks_is_asked_for(tp):
    with pytest.raises(ValueError, match="tp is a number of ranks"):
        explain(model(), tp)


def test_at_most_three_names_are_proposed():
    layers = nn.ModuleDict({f"layer{n}": nn.Linear(2, 2) for n in range(5)})
    with pytest.raises(ValueError, match=r"nearest module names: [^,]*, [^,]*, [^,]*$"):
        explain(layers, 2, {"layer": "column"})
