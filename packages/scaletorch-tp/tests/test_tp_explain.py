"""What a plan does, told before any rank starts, is what the ranks then do."""

import dataclasses
import itertools
import json

import pytest
import torch
from gpts import PACKED, Gpt2, Neox, Packed
from hypothesis import given, settings
from hypothesis import strategies as st
from llamas import Llama
from torch import nn
from torch.distributed import group

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import apply_tensor_parallel, explain

MODEL = {"heads": 4, "kv_heads": 2, "hidden": 12}


class Wide(nn.Module):
    """A whole output and a whole input."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(12, 7), nn.Linear(7, 12)


class Flat(nn.Module):
    """A model that is a region itself, but for sequence parallelism."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(18, 18) for _ in range(3))


class Chain(nn.Sequential):
    """An embedding on every rank, a norm said to be whole, one column and one row."""

    def __init__(self):
        norms = nn.LayerNorm(12), nn.LayerNorm(12)
        super().__init__(nn.Embedding(13, 12), *norms, nn.Linear(12, 18), nn.Linear(18, 12))


UNSHARDED = {  # attention is left whole: with sequence parallelism it gathers its input
    **{"**.wte": "vocab", "lm_head": "column_gather", "transformer.h.*": "sequence_layer"},
    **{"**.mlp.c_fc": "column", "**.mlp.c_proj": "row"},
}
CASES = {
    "grouped": (Llama, MODEL, None),
    "heads": (Llama, {"heads": 4, "kv_heads": 4}, None),
    "packed": (Packed, {}, {name: style for name, style in PACKED.items() if name}),
    "wide": (Wide, {}, {"wide": "column_gather", "narrow": "row_split"}),
    "flat": (
        Flat,
        {},
        {"embed": "vocab", "gate_proj": "column", "up_proj": "column", "down_proj": "row"},
    ),
    "chain": (Chain, {}, {"2": "replicate", "3": "column", "4": "row"}),
    "gpt2": (Gpt2, {}, None),
    "neox": (Neox, {}, None),
    "unsharded": (Gpt2, {}, UNSHARDED),
}


def measured():
    """The shapes on this rank, of each case."""
    return {key: step(*CASES[key[0]], key[1]) for key in itertools.product(CASES, (False, True))}


def step(kind, options, plan, sequence_parallel):
    model = kind(**options)
    apply_tensor_parallel(model, plan, group.WORLD, sequence_parallel=sequence_parallel)
    return {n: tuple(p.shape) for n, p in model.named_parameters()}


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_ranks_hold_what_was_said(tp):
    for rank, found in enumerate(run_ranks(measured, tp)):
        for (case, sequence_parallel), shapes in found.items():
            kind, options, plan = CASES[case]
            model = kind(**options)
            told = explain(model, tp, plan, sequence_parallel=sequence_parallel)
            names = {name for name, _ in model.named_parameters()}  # a tied one has two
            held = {p.name: p.local_shapes[rank] for p in told.parameters if p.name in names}
            assert held == shapes, case


def test_it_is_plain_data():
    told = explain(Llama(**MODEL), 2)
    data = json.loads(json.dumps(dataclasses.asdict(told)))
    assert data["tp"] == 2
    assert data["parameters"][0] == {
        "name": "embed_tokens.weight",
        "style": "vocab",
        "shape": [13, 12],
        "dim": 0,
        "local_shapes": [[7, 12], [6, 12]],
    }


def test_the_table_has_one_line_for_equal_layers():
    lines = str(explain(Llama(**MODEL), 2)).splitlines()
    q_proj = [line.split() for line in lines if "q_proj.weight" in line]
    expected = "layers.*.self_attn.q_proj.weight column 16 x 12 8 x 12 2"
    assert [" ".join(line) for line in q_proj] == [expected]
    assert any("embed_tokens.weight" in line and "7 x 12 or 6 x 12" in line for line in lines)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8))
def test_every_element_is_somewhere(tp):
    told = explain(Llama(heads=8, kv_heads=8), tp)
    for parameter in told.parameters:
        whole = torch.Size(parameter.shape).numel()
        held = [torch.Size(shape).numel() for shape in parameter.local_shapes]
        assert len(held) == tp
        assert sum(held) == (whole * tp if parameter.dim is None else whole)


def test_parameters_need_no_memory():
    with torch.device("meta"):
        model = Llama(**MODEL)
    assert explain(model, 4) == explain(Llama(**MODEL), 4)


@pytest.mark.parametrize("tp", [0, -1, 2.0, True, "2"])
def test_a_number_of_ranks_is_asked_for(tp):
    with pytest.raises(ValueError, match="tp is a number of ranks"):
        explain(Llama(**MODEL), tp)


def test_a_plan_that_does_not_fit_is_not_explained():
    with pytest.raises(ValueError, match=r"nearest module names: .*narrow"):
        explain(Wide(), 2, {"narroww": "column"})


def test_at_most_three_names_are_proposed():
    with pytest.raises(ValueError, match=r"nearest module names: [^,]*, [^,]*, [^,]*$"):
        explain(
            nn.ModuleDict({f"layer{n}": nn.Linear(2, 2) for n in range(5)}), 2, {"layer": "column"}
        )
