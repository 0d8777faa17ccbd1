"""Where a model is cut: inference, description, refusals, and what is left on a stage."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from one_process import Net, pair, require_same, serial, token_batches, trains_on
from torch import nn

from scaletorch.dist import InvalidArgumentError, all_gather_object
from scaletorch.dist.testing import distributed_test
from scaletorch.parallel.pipeline_parallel import Split, layers_of, train_step_pipeline
from scaletorch.parallel.pipeline_parallel.splitting.split import place


class Rotary(nn.Module):
    def forward(self, x):
        return torch.arange(x.shape[1])


class Block(nn.Module):
    def __init__(self, num_experts=2):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(num_experts))

    def forward(self, x):
        return x + sum(expert(x) for expert in self.experts)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.dropout = nn.Dropout(0.5)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(4, elementwise_affine=False)
        self.rotary_emb = Rotary()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.lm_head = nn.Linear(4, 8)


class TwoLists(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(4, 4)])
        self.decoder = nn.ModuleList([nn.Linear(4, 4)])


class Bottleneck(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x):
        return (x + self.bn(self.conv(x))).relu()


class Pool(nn.Module):
    """No parameters and not torch's own, but called in turn by the Sequential that holds it."""

    def forward(self, x):
        return x.mean((-2, -1))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()
        for index in range(1, 5):
            self.add_module(f"layer{index}", nn.Sequential(Bottleneck(), Bottleneck()))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        for layer in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = layer(x)
        return self.fc(self.flatten(self.avgpool(x)))


class InTurn(nn.Sequential):
    def __init__(self):
        trunk = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Dropout(0.0), Bottleneck(), Pool())
        super().__init__(trunk, nn.ReLU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


SPLIT = Split(
    first=("model.embed_tokens", "model.dropout"),
    layers="model.layers",
    last=("model.norm", "lm_head"),
)


def test_inference_at_any_depth():
    assert place(Outer(), None, 2).split == SPLIT
    names = tuple(f"model.layers.{index}" for index in range(3))
    assert layers_of(Outer()) == layers_of(Outer(), SPLIT) == names


def test_children_of_the_most_common_class_begin_the_layers_of_a_sequence():
    before, after = nn.Embedding(4, 4), nn.LayerNorm(4)
    model = nn.Sequential(before, nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), after)
    assert layers_of(model) == ("1", "2", "3")
    assert place(model, None, 2).stages == (("0", "1", "2"), ("3", "4", "5"))


REFUSED = [
    (TwoLists, None, r"has encoder, decoder; pass Split\(first="),
    (Pool, None, r"expected one nn\.ModuleList .* Pool has none; pass Split\("),
    (Outer, {"layers": "model.layers"}, "a Split or None, got dict"),
    (Outer, Split("model.embed", "model.layers"), "'model.embed', .* it has model.embed_tokens, "),
    (Outer, Split((), "layers"), "'layers', which the model does not have; it has model, lm_head"),
    (Outer, Split("lm_head", "model.layers", "lm_head"), "twice: 'lm_head' and 'lm_head'"),
    (Outer, Split("model.layers.0", "model.layers"), "twice: 'model.layers.0' and 'model.layers'"),
    (Outer, Split((), "lm_head"), r"must name an nn\.ModuleList, .* it is a Linear"),
    (Outer, Split("model.embed_tokens", "model.layers"), "does not name .*: lm_head; add each"),
    (Outer, Split("model.embed_tokens"), "does not name .*: lm_head; add each"),
    (Outer, Split(points=("a", "b")), "makes 3 stages and the pipeline has 2: expected 1 points"),
    (Outer, Split(points="lm_head", layers="x"), "cannot be given with them; leave out the points"),
    (Outer, Split(points="lm_head", costs="parameters"), "cannot be given with them"),
    (ResNet, ["layer9"], "names 'layer9', which the model does not have; it has conv1, bn1, relu,"),
    (ResNet, ["layer4.1.conv.x"], "'layer4.1.conv.x', .* it has no modules in layer4.1.conv"),
    (ResNet, ["layer2", "layer2"], "got layer2, layer2; expected layer2$"),
    (ResNet, ["layer4.1", "layer2"], "got layer4.1, layer2; expected layer2, layer4.1"),
    (ResNet, ["layer2", "layer2.0"], "leaves stage 1 without parameters: .* no modules;"),
    (ResNet, ["conv1"], "leaves stage 0 without parameters: .* no modules; move"),
    (ResNet, ["avgpool", "fc"], "stage 1 without parameters: .* it has avgpool, flatten; move"),
]


@pytest.mark.parametrize(("kind", "split", "text"), REFUSED)
def test_splits_that_do_not_fit(kind, split, text):
    num_stages = 2
    if isinstance(split, list):
        split, num_stages = Split(points=split), len(split) + 1
    with pytest.raises(InvalidArgumentError, match=text):
        place(kind(), split, num_stages)


def test_points_cut_containers_between_their_children():
    placement = place(ResNet(), Split(points=("layer2", "layer4.1")), 3)
    assert placement.stages == (
        ("conv1", "bn1", "relu", "layer1"),
        ("layer2", "layer3", "layer4.0"),
        ("layer4.1", "avgpool", "flatten", "fc"),
    )
    assert placement.stages_of("layer4.1.bn.weight") == (2,)
    assert placement.stages_of("layer4.0") == (1,)
    assert placement.stages_of("layer4") == (0, 1, 2)


def test_a_module_without_parameters_is_on_all_stages_if_no_point_names_it():
    placement = place(Outer(), Split(points=("model.layers.1", "model.norm")), 3)
    assert placement.stages_of("model.rotary_emb") == (0, 1, 2)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "pool": Pool(), "b": nn.Linear(2, 2)})
    assert place(model, Split(points=("pool",)), 2).stages == (("a",), ("pool", "b"))
    assert place(model, Split(points=("b",)), 2).stages == (("a",), ("b",))


class Language(Net):
    """Its layers are a list of Sequentials, one of them cut in the middle."""

    num_layers, vocabulary = 2, 8

    def layer(self):
        return nn.Sequential(Block(), nn.Linear(4, 4), nn.Tanh(), Block())


@distributed_test(world_size=3)
def test_training_between_points():
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(4, 2, 3, 4, 4, generator=generator, dtype=torch.float64)
    for kind, points in (
        (Language, ("layers.0.2", "layers.1.1")),
        (Language, ("layers.0", "layers.1")),
        (ResNet, ("layer1.1", "layer4.1")),
        (ResNet, ("bn1", "fc")),
        (InTurn, ("0.2", "2")),
    ):
        plain, stage = pair(kind, points=Split(points=points))
        batches = [{"input_ids": image} for image in images]
        if kind is Language:
            batches = token_batches(vocabulary=8)
        trains_on(stage, plain, batches, lambda output, batch: output.square().sum())
        names = chain(*all_gather_object([name for name, _ in stage.named_parameters()]))
        assert sorted(names) == sorted(name for name, _ in plain.named_parameters())


def test_modules_without_a_forward_are_placed_by_what_is_inside():
    described = Split(("model.embed_tokens",), None, ("lm_head", "model.norm", "model.dropout"))
    model = Outer()
    model.lm_head = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(4, 8)}), nn.Linear(4, 8)])
    with pytest.raises(InvalidArgumentError, match=r"has model\.layers, lm_head; pass"):
        place(model, described, 2)
    placement = place(model, replace(described, layers="model.layers"), 2)
    assert placement.split == replace(described, layers="model.layers")
    assert placement.stages == (
        ("model.embed_tokens", "model.layers.0", "model.layers.1"),
        ("model.layers.2", "lm_head.0.a", "lm_head.1", "model.norm", "model.dropout"),
    )
    assert placement.stages_of("lm_head.0.a.weight") == (1,)


def test_a_split_is_written_and_shown_shortly():
    assert Split(first="wte", last=["norm", "head"]) == Split(("wte",), last=("norm", "head"))
    assert Split(points="layer2") == Split(points=["layer2"])
    text = "Split(first=('a',), layers='b', costs=(0.1, 2, 0))"
    assert repr(Split("a", "b", costs=[0.1, 2, 0])) == text
    assert repr(Split()) == "Split()"


class Seeing(nn.Module):
    """A decoder with a tower for images, and projections beside its layers."""

    def __init__(self):
        super().__init__()
        self.tower = nn.Module()
        self.tower.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
        self.decoder = nn.Module()
        self.decoder.early = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.decoder.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        self.head = nn.Linear(2, 2)

    def get_decoder(self):
        return self.decoder


def test_layers_are_those_of_the_decoder_that_a_model_names():
    found = place(Seeing(), None, 2).split
    assert found.layers == "decoder.layers"
    assert set(found.first + found.last) == {"tower", "decoder.early", "head"}
    deeper = Seeing()
    deeper.decoder.eyes = nn.ModuleDict({"tower": Seeing().tower})
    assert place(deeper, None, 2).split.layers == "decoder.layers"
    deeper.decoder.more = nn.ModuleList([nn.Sequential(nn.Linear(2, 2))])
    with pytest.raises(InvalidArgumentError, match=r"has decoder\.layers, decoder\.more; pass"):
        place(deeper, None, 2)


class Stack(nn.Module):
    """Layers that return a tuple; given hidden states of an encoder, each adds their mean."""

    def __init__(self, num_layers):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.embed = nn.Embedding(8, 4)
        self.layers = nn.ModuleList(Attending() for _ in range(num_layers))

    def forward(self, ids, encoder_hidden_states=None):
        x = self.embed(ids)
        for layer in self.layers:
            x, _ = layer(x, encoder_hidden_states)
        return self.norm(x)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, others=None):
        more = 0 if others is None else others.mean(1, keepdim=True)
        return x + self.linear(x + more).tanh(), None


class Translating(nn.Module):
    """An encoder, a bridge, a decoder and a head, registered in another order."""

    def __init__(self, encoding=3, decoding=3):
        super().__init__()
        self.head, self.decoder = nn.Linear(4, 8), Stack(decoding)
        self.bridge, self.encoder = nn.Linear(4, 4), Stack(encoding)

    def get_encoder(self):
        return self.encoder

    def get_decoder(self):
        return self.decoder

    def forward(self, input_ids):
        states = self.bridge(self.encoder(input_ids.flip(1)))
        return self.head(self.decoder(input_ids, states))


def test_an_encoder_and_its_decoder_are_both_spread():
    assert place(Translating(1, 2), None, 3).stages == (
        ("encoder.embed", "encoder.layers.0", "encoder.norm"),
        ("bridge", "decoder.embed", "decoder.layers.0"),
        ("decoder.layers.1", "decoder.norm", "head"),
    )
    costs = Split(costs="parameters")
    whole = {name for name, stage in place(Translating(), costs, 3).homes() if "layers" in name}
    assert whole == {f"decoder.layers.{index}" for index in range(3)}


@distributed_test(world_size=4)
def test_an_encoder_and_its_decoder_train():
    for encoding, decoding in ((3, 3), (1, 3), (5, 2)):
        plain, stage = pair(Translating, encoding, decoding)
        serial(plain, token_batches(vocabulary=8))
        train_step_pipeline(stage, token_batches(vocabulary=8))
        require_same(stage, plain)


class Decoder(nn.Module):
    """Registers what is called last in front, and what is called first behind."""

    def __init__(self):
        super().__init__()
        self.final_norm, self.embed = nn.LayerNorm(4), nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.embed_norm, self.unused, self.twice = (nn.LayerNorm(4) for _ in range(3))
        self.projections = nn.ModuleDict({name: nn.Linear(4, 4) for name in "ab"})

    def forward(self, ids):
        if len(self.layers) != 2:
            raise ValueError
        x = self.twice(self.embedded(ids))
        for layer in self.layers:
            x = layer(x)
        if self.final_norm is not None:
            x = self.final_norm(self.twice(x)) / len(self.layers)
        return x

    def embedded(self, ids):
        x = self.embed_norm(self.embed(ids))
        return sum(self.projections[name](x) for name in "ab")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.head, self.decoder = nn.Linear(4, 5), Decoder()

    def forward(self, ids):
        return self.head(self.decoder(ids))


def test_modules_are_placed_by_the_calls_in_the_source_and_else_by_their_registration():
    split = place(Model(), None, 2).split
    assert split.first == ("decoder.embed", "decoder.embed_norm", "decoder.projections")
    assert split.last == ("decoder.final_norm", "decoder.unused", "decoder.twice", "head")
    made = {}
    exec("def forward(self, ids):\n    return self.final_norm(self.embed(ids))", made)
    decoder = Decoder()
    decoder.__class__ = type("Made", (Decoder,), {"forward": made["forward"]})
    assert place(decoder, None, 2).split.first == ("final_norm", "embed")
