"""What a plan does, told before any rank starts, is what the ranks then do."""

import dataclasses
import itertools
import json
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import group
from torch.utils._python_dispatch import TorchDispatchMode

from scaletorch.dist.testing import run_ranks
from scaletorch.parallel.tensor_parallel import Fused, apply_tensor_parallel, explain
from scaletorch.parallel.tensor_parallel.plans.explanation import table

VOCAB, HIDDEN, BATCH, LENGTH = 13, 12, 2, 12
TOKENS = BATCH * LENGTH


class Attention(nn.Module):
    def __init__(self, heads, key_values):
        super().__init__()
        self.head_dim = 4
        self.q_proj = nn.Linear(HIDDEN, heads * 4)
        self.k_proj = nn.Linear(HIDDEN, key_values * 4)
        self.v_proj = nn.Linear(HIDDEN, key_values * 4)
        self.q_norm = nn.RMSNorm(4)
        self.o_proj = nn.Linear(heads * 4, HIDDEN)

    def forward(self, x):
        q, k, v = (
            p(x).view(*x.shape[:2], -1, 4).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = nn.functional.scaled_dot_product_attention(self.q_norm(q), k, v, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 18), nn.Linear(HIDDEN, 18)
        self.down_proj = nn.Linear(18, HIDDEN)

    def forward(self, x):
        return self.down_proj(self.gate_proj(x) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, heads, key_values):
        super().__init__()
        self.self_attn = Attention(heads, key_values)
        self.mlp = Mlp() if heads > key_values else nn.ModuleDict(Mlp().named_children())

    def forward(self, x):
        x = x + self.self_attn(x)
        if isinstance(self.mlp, Mlp):
            return x + self.mlp(x)
        return x + Mlp.forward(self.mlp, x)  # a container, that nobody calls


class Model(nn.Module):
    def __init__(self, heads=4, key_values=2):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer(heads, key_values) for _ in range(2))
        self.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class Gated(nn.Module):
    """Packed parts, a whole output and a whole input."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 20)
        self.down = nn.Linear(10, HIDDEN)
        self.wide = nn.Linear(HIDDEN, 7)
        self.narrow = nn.Linear(7, HIDDEN)

    def forward(self, ids):
        gate, up = self.gate_up(self.embed(ids)).chunk(2, -1)
        return self.narrow(self.wide(self.down(gate * up)))


GATED = {
    "embed": "vocab",
    "gate_up": Fused("column", 2),
    "down": "row",
    "wide": "column_gather",
    "narrow": "row_split",
}


class Flat(nn.Module):
    """A model that is a region itself, but for sequence parallelism."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.gate_proj, self.up_proj = nn.Linear(HIDDEN, 18), nn.Linear(HIDDEN, 18)
        self.down_proj = nn.Linear(18, HIDDEN)

    def forward(self, ids):
        return Mlp.forward(self, self.embed(ids))


FLAT = {"embed": "vocab", "gate_proj": "column", "up_proj": "column", "down_proj": "row"}


class Chain(nn.Sequential):
    """An embedding on every rank, a norm said to be whole, one column and one row."""

    def __init__(self):
        norms = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        ends = nn.Linear(HIDDEN, 18), nn.Linear(18, HIDDEN)
        super().__init__(nn.Embedding(VOCAB, HIDDEN), *norms, *ends)


CHAIN = {"2": "replicate", "3": "column", "4": "row"}


class Conv1D(nn.Module):
    """A transposed linear layer, as transformers names it."""

    def __init__(self, nx, nf):
        super().__init__()
        self.nx, self.nf = nx, nf
        self.weight, self.bias = nn.Parameter(torch.ones(nx, nf)), nn.Parameter(torch.ones(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Between(nn.Module):
    """An attention with one packed weight, or an MLP, by its shapes."""

    def __init__(self, dense, first, last, parts):
        super().__init__()
        self.names, self.parts = (first, last), parts
        self.add_module(first, dense(HIDDEN, parts * HIDDEN))
        self.add_module(last, dense(HIDDEN, HIDDEN))

    def forward(self, x):
        first, last = (getattr(self, name) for name in self.names)
        return last(sum(first(x).chunk(self.parts, -1)))


class Gpt2(nn.Module):
    """Its names; positions are those of each sequence, so that their embedding is of all tokens."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.h = nn.ModuleList([nn.ModuleDict()])
        self.h[0]["ln_1"] = nn.LayerNorm(HIDDEN)
        self.h[0]["attn"] = Between(Conv1D, "c_attn", "c_proj", 3)
        self.h[0]["attn"].num_heads, self.h[0]["attn"].head_dim = 4, 3
        self.h[0]["mlp"] = Between(Conv1D, "c_fc", "c_proj", 1)
        self.ln_f = nn.LayerNorm(HIDDEN)  # after which sequences are whole
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]).expand_as(ids))
        for module in self.h[0].values():
            x = x + module(x)
        return self.lm_head(self.ln_f(x))


class Neox(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_in = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([nn.ModuleDict()])
        self.layers[0]["norm"] = nn.LayerNorm(HIDDEN)
        self.layers[0]["attention"] = Between(nn.Linear, "query_key_value", "dense", 3)
        self.layers[0]["attention"].num_attention_heads = 4
        self.layers[0]["mlp"] = Between(nn.Linear, "dense_h_to_4h", "dense_4h_to_h", 1)
        self.embed_out = nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed_in(ids)
        for module in self.layers[0].values():
            x = x + module(x)
        return self.embed_out(x)


UNSHARDED = {  # attention is left whole: with sequence parallelism it gathers its input
    **{"wte": "vocab", "lm_head": "column_gather", "ln_f": "sequence_join"},
    **{"h.0.mlp.c_fc": "column", "h.0.mlp.c_proj": "row"},
}
CASES = {
    "grouped": (Model, (), None),
    "heads": (Model, (4, 4), None),
    "packed": (Gated, (), GATED),
    "flat": (Flat, (), FLAT),
    "chain": (Chain, (), CHAIN),
    "gpt2": (Gpt2, (), None),
    "neox": (Neox, (), None),
    "unsharded": (Gpt2, (), UNSHARDED),
}


# Operator -> what it does, and which argument is the whole; gloo scatters by an all-to-all.
OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "alltoall_base_": ("reduce_scatter", 1),
}


class Sent(TorchDispatchMode):
    """Counts what torch is told to send, in elements of the whole tensors."""

    def __init__(self):
        super().__init__()
        self.phase, self.elements = "forward", Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            operation, place = OPERATIONS[function.name().split("::")[1]]
            whole = args[place] if isinstance(args[place], torch.Tensor) else args[place][0]
            self.elements[self.phase, operation] += whole.numel()
        return function(*args, **(kwargs or {}))


def measured():
    """The shapes on this rank, and the elements of the collectives of one step, of each case."""
    return {key: step(*CASES[key[0]], key[1]) for key in itertools.product(CASES, (False, True))}


def step(kind, args, plan, sequence_parallel):
    model = kind(*args)
    apply_tensor_parallel(model, plan, group.WORLD, sequence_parallel=sequence_parallel)
    with Sent() as sent:
        out = model(torch.arange(TOKENS).view(BATCH, -1) % VOCAB)
        sent.phase = "backward"
        out.sum().backward()
    return {n: tuple(p.shape) for n, p in model.named_parameters()}, dict(sent.elements)


def expected(told):
    """Those that are told; a gather of uneven shares is padded to the longest."""
    elements = Counter()
    for c in told.communications:
        if c.operation == "all_gather":
            c = dataclasses.replace(c, per_token=-(-c.per_token // told.tp) * told.tp)
        elements[c.phase, c.operation] += c.bytes(TOKENS, 1)
    return dict(elements)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_ranks_hold_and_send_what_was_said(tp):
    for rank, found in enumerate(run_ranks(measured, tp)):
        for (case, sequence_parallel), (shapes, elements) in found.items():
            kind, args, plan = CASES[case]
            model = kind(*args)
            told = explain(model, tp, plan, sequence_parallel=sequence_parallel)
            names = {name for name, _ in model.named_parameters()}  # a tied one has two
            held = {p.name: p.local_shapes[rank] for p in told.parameters if p.name in names}
            assert held == shapes, case
            assert elements == expected(told), (case, sequence_parallel)


def test_it_is_plain_data_and_sums_up():
    told = explain(Model(), 2)
    data = json.loads(json.dumps(dataclasses.asdict(told)))
    assert data["tp"] == 2
    assert data["parameters"][0] == {
        "name": "embed_tokens.weight",
        "style": "vocab",
        "shape": [13, 12],
        "dim": 0,
        "local_shapes": [[7, 12], [6, 12]],
    }
    layers = told.bytes_by_layer(100, 4)
    assert list(layers) == ["embed_tokens", "layers.0", "layers.1", "lm_head"]
    assert layers["embed_tokens"] == 100 * 12 * 4
    # Two sums forward, two backward, and the norm's gradient.
    assert layers["layers.0"] == (4 * 100 * 12 + 4) * 4
    assert layers["lm_head"] == 100 * (12 + 13) * 4
    assert sum(layers.values()) == told.bytes(100, 4)
    all_reduced = told.bytes(100, 4) - 100 * 13 * 4
    assert told.bytes_sent(100, 4) == all_reduced + 100 * 13 * 4 // 2
    assert sum(told.bytes_sent_by_layer(100, 4).values()) == told.bytes_sent(100, 4)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_shares_of_sequences_send_what_whole_ones_do(tp):
    whole, shares = (
        explain(Model(), tp, sequence_parallel=sequence).bytes_sent_by_layer(120, 4)
        for sequence in (False, True)
    )
    summed = 2 * HIDDEN * 4 * (tp - 1) // tp  # the gradient of a norm or of a row's bias
    more = {"layers.0": 2 * summed, "layers.1": 2 * summed, "norm": summed}
    assert shares == {name: whole.get(name, 0) + more.get(name, 0) for name in shares}
    assert {*shares} == {*whole, "norm"}


def test_a_region_gathers_and_scatters_once():
    told = explain(Model(), 2, sequence_parallel=True).communications
    region = [dataclasses.astuple(c) for c in told if c.module == "layers.0.mlp"]
    of = " (gate_proj, up_proj)"
    assert region == [
        ("layers.0.mlp", "forward", "all_gather", f"input{of}", HIDDEN, 0),
        ("layers.0.mlp", "backward", "reduce_scatter", f"input's gradient{of}", HIDDEN, 0),
    ]
    ends = [dataclasses.astuple(c)[1:] for c in told if c.module == "layers.0.mlp.down_proj"]
    assert ends == [
        ("forward", "reduce_scatter", "output", HIDDEN, 0),
        ("backward", "all_gather", "output's gradient", HIDDEN, 0),
        ("backward", "all_reduce", "bias's gradient", 0, HIDDEN),
    ]


def test_the_table_has_one_line_for_equal_layers():
    lines = str(explain(Model(), 2)).splitlines()
    q_proj = [line.split() for line in lines if "q_proj.weight" in line]
    expected = "layers.*.self_attn.q_proj.weight column 16 x 12 8 x 12 2"
    assert [" ".join(line) for line in q_proj] == [expected]
    at = next(i for i, line in enumerate(lines) if "input's gradient (q_proj, k_proj," in line)
    assert lines[at].startswith("layers.*.self_attn ")
    assert lines[at + 1].split() == ["v_proj)"]
    assert any("embed_tokens.weight" in line and "7 x 12 or 6 x 12" in line for line in lines)
    assert lines[-2] == (
        "one forward and backward: 133 T + 8 elements, T = batch x sequence length"
    )
    assert lines[-1] == "each rank of a ring sends 1/2 of 253 T + 16 elements"


@pytest.mark.parametrize("case", CASES)
def test_the_table_fits_a_screen(case):
    kind, args, plan = CASES[case]
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": kind(*args)})})
    plan = plan and {f"**.{pattern}": style for pattern, style in plan.items()}
    told = explain(model, 4, plan, sequence_parallel=True)
    text = str(told)
    assert max(map(len, text.splitlines())) <= 100
    words = {word for c in told.communications for word in c.tensor.split()}
    assert words <= {*text.split()}


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(0, 999), st.integers(1, 8))
def test_every_element_is_somewhere(tp, tokens, size):
    told = explain(Model(8, 8), tp)
    for parameter in told.parameters:
        whole = torch.Size(parameter.shape).numel()
        held = [torch.Size(shape).numel() for shape in parameter.local_shapes]
        assert len(held) == tp
        assert sum(held) == (whole * tp if parameter.dim is None else whole)
    assert told.bytes(tokens, size) == size * told.bytes(tokens, 1)
    assert bool(told.communications) == (tp > 1)


def test_parameters_need_no_memory():
    with torch.device("meta"):
        model = Model()
    assert explain(model, 4) == explain(Model(), 4)


@pytest.mark.parametrize("tp", [0, -1, 2.0, True, "2"])
def test_a_number_of_ranks_is_asked_for(tp):
    with pytest.raises(ValueError, match="tp is a number of ranks"):
        explain(Model(), tp)


def test_long_cells_continue_below_at_blanks_and_dots():
    sizes = "32064 x 4096 or 32063 x 4096"
    name = f"{'a' * 36}.{'b' * 36}"
    assert table(("name", "on each"), [(name, sizes)] * 2) == [
        f"name{' ' * 71}on each             times",
        f"{name}  32064 x 4096 or     2",
        f"{' ' * 75}32063 x 4096",
    ]
    name = f"{'a' * 46}.{'b' * 46}"
    assert table(("name", "on each"), [(name, sizes)]) == [
        f"name{' ' * 77}on each       times",
        f"{'a' * 46}.{' ' * 34}32064 x 4096  1",
        f"{'b' * 46}{' ' * 35}or",
        f"{' ' * 81}32063 x 4096",
    ]


def test_a_plan_that_does_not_fit_is_not_explained():
    with pytest.raises(ValueError, match="joins the sequences for heads"):
        explain(Chain(), 2, {**CHAIN, "2": "sequence_join"}, sequence_parallel=True)
    with pytest.raises(ValueError, match=r"nearest module names: .*gate_up"):
        explain(Gated(), 2, {"gate_upp": "column"})


def test_at_most_three_names_are_proposed():
    with pytest.raises(ValueError, match=r"nearest module names: [^,]*, [^,]*, [^,]*$"):
        explain(
            nn.ModuleDict({f"layer{n}": nn.Linear(2, 2) for n in range(5)}), 2, {"layer": "column"}
        )
