"""Layers that `torch.compile` compiles train on every axis to the numbers that they give as is."""

import pytest
import torch
from sweeps import today
from tiny_transformers import tiny
from torch import nn
from training import SIZES, grid, llama, tokens

from scaletorch import bisect
from scaletorch.compose import full_gradients, parallelize, shard_global_batch, train_step
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import distributed_test, relative_error, run_ranks, worst
from scaletorch.models import Mixture, MixtureConfig

pytestmark = [
    pytest.mark.timeout(300),
    # dynamo looks whether tensors have a gradient, and tells what it cannot keep or trace
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Dynamo (detected a call to a|does not know how)"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

SHARED = {"sequence_parallel": True, "loss_parallel": True}
LAYOUTS = {
    "dp": ({"dp_size": 2}, {}),
    "dp recomputed": ({"dp_size": 2}, {"recompute": True}),
    "pp": ({"pp_size": 2}, {}),
    "sequence": ({"tp_size": 2}, SHARED),
    "tp recomputed": ({"tp_size": 2}, {"recompute": True}),
    "cp": ({"cp_size": 2}, {}),
    "ep": ({"dp_size": 2, "ep_size": 2}, {}),
}
WHENS = {"dp": ("before", "after", "whole")}  # of others, before


def built(layout):
    torch.manual_seed(0)
    mixture = layout == "ep"
    return (Mixture(MixtureConfig(**SIZES, num_experts=4)) if mixture else llama()).double()


def batch():
    found = tokens(1)
    found["labels"][1, 3:] = -100
    return found


def trained(layout, manager, when, graphs):
    """Return the second loss, and its gradients; compiled graphs are added to a list."""

    def noting(graph, _):
        nodes = [n for m in graph.modules() if hasattr(m, "graph") for n in m.graph.nodes]
        graphs.append(sum(node.op.startswith("call") for node in nodes))
        return graph

    def compile_layers(model):
        for module in [model] if when == "whole" else model.layers:
            module.compile(backend=noting)

    model = built(layout)
    if when == "before":
        compile_layers(model)
    parallel = parallelize(model, manager, **LAYOUTS[layout][1], rehearse=False)
    if when in ("after", "whole"):
        compile_layers(model if when == "after" else parallel)
    for _ in range(2):  # the first step looks at the model too
        parallel.reset()
        loss = train_step(parallel, shard_global_batch(batch(), 2, model=parallel))
    return [loss, full_gradients(parallel)]


def compare(layouts):
    """Return for each layout the largest error, the number of breaks, and operations of graphs."""
    found = {}
    for layout in layouts:
        with grid(LAYOUTS[layout][0]) as manager:
            loss, gradients = trained(layout, manager, None, [])
            for when in WHENS.get(layout, ("before",)):
                torch._dynamo.reset()
                torch._dynamo.utils.counters.clear()
                own, others = trained(layout, manager, when, graphs := [])
                errors = [relative_error(others[name], each) for name, each in gradients.items()]
                breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
                found[layout, when] = worst([relative_error(own, loss), *errors]), breaks, graphs
    return found


def compared(*layouts):
    """Return both ranks' breaks, and operations of graphs; all numbers are those of the model."""
    ranks = run_ranks(compare, 2, layouts, timeout=250)
    for found in ranks:
        assert worst(error for error, _, _ in found.values()) < 1e-12, found
    return [{layout: (b, sum(g)) for (layout, _), (_, b, g) in found.items()} for found in ranks]


def test_layers_that_do_not_communicate_are_whole_graphs():
    first, last = compared("dp", "dp recomputed", "pp")
    for found in (first, last):
        assert found["dp"][0] == found["dp recomputed"][0] == 0
        assert min(operations for _, operations in found.values()) > 30, found
    assert first["pp"][0] == last["pp"][0] == 0  # what a stage passes on is noted outside


@pytest.mark.parametrize("layout", today(["sequence", "cp", "tp recomputed", "ep"], 4))
def test_graphs_break_where_layers_communicate(layout):
    for found in compared(layout):
        breaks, operations = found[layout]
        assert breaks > 0
        # A break within what is recomputed leaves all of it to Python.
        assert (operations == 0) == (layout == "tp recomputed"), found


def mixtral(backend):
    """Return the losses of two steps of a model of transformers, with layers compiled or not."""
    model, losses = tiny("Mixtral", num_hidden_layers=1, num_local_experts=4), []
    with grid({"dp_size": 2, "ep_size": 2}) as manager:
        parallel = parallelize(model, manager, rehearse=False)
        for layer in model.base_model.layers if backend else ():
            layer.compile(backend=backend)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for _ in range(2):
            cut = shard_global_batch(batch(), 1, model=parallel)
            losses.append(train_step(parallel, cut).item())
            optimizer.step()
            optimizer.zero_grad()
    return losses


def test_layers_of_transformers_with_experts_are_compiled():
    pytest.importorskip("transformers")
    expected, found = (run_ranks(mixtral, 2, each, timeout=250)[0] for each in (None, "aot_eager"))
    assert found == pytest.approx(expected, rel=1e-12)


@distributed_test(2)
def test_a_module_around_the_model_is_refused():
    message = r"torch\.compile\(model\) returns a module around .* in place.*layer\.compile\(\)"
    with grid({"pp_size": 2}) as manager:
        with pytest.raises(InvalidArgumentError, match=message):
            parallelize(torch.compile(built("pp"), backend="eager"), manager, rehearse=False)
        parallel = parallelize(built("pp"), manager, rehearse=False)
        batches = shard_global_batch(batch(), 2, model=parallel)
        with pytest.raises(InvalidArgumentError, match=message):
            train_step(torch.compile(parallel, backend="eager"), batches)


def record_compiled(folder):
    for name in ("plain", "compiled"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.GELU())).double()
        if name == "compiled":
            model[1].compile(backend="eager")
        with bisect.record(f"{folder}/{name}", model) as tape:
            loss = model(torch.ones(2, 4).double()).square().mean()
            tape.put("loss", loss)
            loss.backward()


def test_a_recording_takes_what_is_compiled_for_one_step(tmp_path):
    run_ranks(record_compiled, 1, str(tmp_path))
    report = bisect.compare(tmp_path / "plain", tmp_path / "compiled")
    assert report.sound
    unseen = {key.name for key, each in report.judged.items() if each.state == "unseen"}
    assert unseen == {"1.0", "1.1"}
    assert report.judged[bisect.Key(0, "backward", "1", "in.0")].state == "good"
