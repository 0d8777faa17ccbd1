"""Which children a forward calls before and after its layers."""

import pytest
from torch import nn

from scaletorch.parallel.pipeline_parallel.splitting.call_order import calls_around
from scaletorch.parallel.pipeline_parallel.splitting.split import place


class Decoder(nn.Module):
    """Registers what is called last in front, and what is called first behind."""

    def __init__(self):
        super().__init__()
        self.scale = 2.0
        self.final_norm, self.embed = nn.LayerNorm(4), nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.embed_norm, self.unused, self.twice = (nn.LayerNorm(4) for _ in range(3))

    def forward(self, ids):
        if len(self.layers) != 2:
            raise ValueError
        x = self.embedded(ids)
        x = self.twice(x)
        for layer in self.layers:
            x = layer(x)
        if self.final_norm is not None:
            x = self.final_norm(self.twice(x)) / len(self.layers)
        return x

    def embedded(self, ids):
        return self.embed_norm(self.embed(ids))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.decoder = nn.Linear(4, 5), Decoder()

    def forward(self, ids):
        return self.head(self.decoder(ids)) * self.decoder.scale


def test_the_source_tells():
    assert calls_around(Decoder(), "layers") == (
        {"embed", "embed_norm", "twice"},
        {"final_norm", "twice"},
    )
    assert calls_around(Model(), "decoder") == (set(), {"head"})


def test_a_split_follows_it_and_else_the_registration():
    split = place(Model(), None, 2).split
    assert split.first == ("decoder.embed", "decoder.embed_norm")
    assert split.last == (
        "decoder.final_norm", "decoder.unused", "decoder.twice", "head",
    )  # fmt: skip


class Projected(Decoder):
    """Calls modules of a list one by one, before its layers."""

    def __init__(self):
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def embedded(self, ids):
        x = self.embed(ids)
        return sum(self.projections[at](x) for at in range(2))


def test_modules_of_a_list_are_called_where_one_of_them_is():
    before, after = calls_around(Projected(), "layers")
    assert (before, after) == ({"embed", "projections", "twice"}, {"final_norm", "twice"})


@pytest.mark.parametrize("child", ["layers", "nothing"])
def test_without_a_source_nothing_is_told(child):
    model = Decoder()
    made = {}
    exec("def forward(self, ids):\n    return self.final_norm(self.embed(ids))", made)
    model.__class__ = type("Made", (Decoder,), {"forward": made["forward"]})
    assert calls_around(model, child) == (set(), set())
