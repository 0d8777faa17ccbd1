"""What FSDP2 and DTensor programs saved by torch.distributed.checkpoint goes on in any layout."""

import copy
import functools
import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpointed import adamw, batch, build, grid
from checkpointed import train as train_on
from sweeps import today
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scaletorch.checkpoint import CheckpointError, DamagedCheckpointError, import_dcp
from scaletorch.compose import parallelize
from scaletorch.dist.testing import preload
from scaletorch.parallel.data_parallel import shard_optimizer
from scaletorch.parallel.pg_manager import destroy_process_group_manager

STEPS, BOUND = 2, 1e-12
preload("torch.distributed.fsdp")


def train(model, optimizer, steps):
    """Train as a program of torch alone does, every rank on the whole batch."""
    losses = []
    for step in steps:
        data = batch(step)
        logits = model(data["input_ids"]).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, data["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def optimizer_of(model):
    return adamw(model, foreach=False)


def train_first(model):
    """Return the optimizer after the first steps, with rates as a scheduler may leave them."""
    optimizer = optimizer_of(model)
    train(model, optimizer, range(STEPS))
    set_rates(optimizer)
    return optimizer


def set_rates(optimizer):
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] = 5e-3 / (1 + number)


@functools.cache
def uninterrupted(tied):
    model = build(3, 32, tied)
    return train(model, train_first(model), range(STEPS, STEPS + 2))


# Name of a folder -> the mesh (fsdp, tp), what the state is called, and whether it is flattened.
SOURCES = {
    "fsdp": ((4, 1), lambda model, state: {"app": {"model": model, "optim": state}}, False),
    "tp and fsdp": ((2, 2), lambda model, state: {"model": model, "optimizer": state}, True),
    "root": ((2, 2), lambda model, state: {**model, "optimizer": state, "train": {"n": 2}}, True),
    "tied": ((2, 2), lambda model, state: {"model": model, "optim": state}, False),
    "replicated": ((1, 4), lambda model, state: {"model": model, "optim": state}, False),
}


def save_by_torch(root, source):
    (fsdp, tp), called, flat = SOURCES[source]
    model = build(3, 32, source == "tied")
    mesh = init_device_mesh("cpu", (fsdp, tp), mesh_dim_names=("fsdp", "tp"))
    columns = {"mlp.up_proj": ColwiseParallel(), "mlp.gate_proj": ColwiseParallel()}
    for layer in model.layers:
        if tp > 1:
            parallelize_module(layer, mesh["tp"], {**columns, "mlp.down_proj": RowwiseParallel()})
        if fsdp > 1:
            fully_shard(layer, mesh=mesh["fsdp"])
    if fsdp > 1:
        fully_shard(model, mesh=mesh["fsdp"])
    optimizer = train_first(model)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = called(*get_state_dict(model, optimizer, options=options))
    dcp.save(state, checkpoint_id=root / source)


@pytest.fixture(scope="module")
def saved(four, tmp_path_factory):
    root = tmp_path_factory.mktemp("dcp")
    for source in SOURCES:
        four.run(save_by_torch, root, source)
    return root


def go_on(root, layout, stage, sources):
    """Return the losses of two more steps from each source."""
    manager, found = grid(layout), {}
    for source in sources:
        model = parallelize(build(8, 32, source == "tied"), manager, rehearse=False)
        optimizer = optimizer_of(model)
        set_rates(optimizer)
        if stage:
            shard_optimizer(optimizer, model, stage=stage)
        import_dcp(model, root / source, optimizer)
        steps = range(STEPS, STEPS + 2)
        found[source] = [train_on(model, optimizer, manager, step) for step in steps]
    destroy_process_group_manager()
    return found


@pytest.mark.parametrize(
    ("layout", "stage"), today([((2, 1, 1, 2), 0), ((2, 2, 1, 1), 1), (None, 0)], 3)
)
def test_training_goes_on_in_layouts_of_ours(four, saved, layout, stage):
    sources = ["fsdp", "tp and fsdp", "tied"]
    if layout is None:
        ranks = [go_on(saved, (1, 1, 1, 1), stage, list(SOURCES))]
    else:
        ranks = four.run(go_on, saved, layout, stage, sources)
    for found in ranks:
        for source, losses in found.items():
            assert losses == pytest.approx(uninterrupted(source == "tied"), rel=0, abs=BOUND)


# Refused on every rank, with nothing changed.


def plain_state(tied=False, layers=2):
    model = build(3, 32, tied, layers)
    optimizer = optimizer_of(model)
    train(model, optimizer, range(1))
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def lose_a_moment(state):
    del state["optim"]["state"]["layers.1.mlp.up_proj.weight"]["exp_avg_sq"]


def add_dampening(state):  # as of SGD
    for group in state["optim"]["param_groups"]:
        group["dampening"] = 0.0


def number(state):
    state["optim"]["state"] = dict(enumerate(state["optim"]["state"].values()))


def untie(state):
    state["model"]["lm_head.weight"] = state["model"]["lm_head.weight"] + 1


def rename(state):
    state["model"] = {f"body.{name}x": tensor for name, tensor in state["model"].items()}


def resize(layers):
    return lambda state: state.update(model=plain_state(layers=layers)["model"])


STATES = {
    "moment": (lose_a_moment, "no exp_avg_sq of the optimizer for layers.1.mlp.up_proj.weight"),
    "class": (add_dampening, "another optimizer.*dampening"),
    "number": (number, r"no exp_avg, exp_avg_sq, step of the optimizer for .*get_state_dict"),
    "twice": (
        lambda state: state.update(average=state["model"]),
        r"more than once, as \['average.', 'model.'\]: save it once",
    ),
    "untied": (untie, "different values for model.lm_head.weight"),
    "elsewhere": (rename, "checkpoint of another model"),
    "model alone": (lambda state: state.pop("optim"), "saved without optimizer"),
    "larger": (resize(3), "no layers.2."),
    "smaller": (resize(1), "has no layers.1."),
}


def change_metadata(folder, change):
    found = pickle.loads((folder / ".metadata").read_bytes())
    change(found, {index.fqn: index for index in found.storage_data})
    (folder / ".metadata").write_bytes(pickle.dumps(found))


def move_a_chunk(found, indices):
    key = "model.norm.weight"
    (chunk,) = found.state_dict_metadata[key].chunks
    info = found.storage_data.pop(indices[key])
    chunk.offsets = torch.Size([8])
    found.storage_data[dcp.metadata.MetadataIndex(key, chunk.offsets)] = info


def swap_bytes(found, indices):
    """Let two tensors of other shapes have each other's bytes."""
    data = found.storage_data
    one, other = (indices[f"model.{name}.weight"] for name in ("norm", "layers.0.self_attn.q_proj"))
    data[one], data[other] = data[other], data[one]


def leave_the_folder(found, indices):
    info = found.storage_data[indices["model.norm.weight"]]
    info.relative_path = f"../number/{info.relative_path}"


def flip(folder):
    def change(found, indices):
        info = found.storage_data[indices["model.norm.weight"]]
        data[info.offset + info.length // 2] ^= 1

    data = bytearray((folder / "__0_0.distcp").read_bytes())
    change_metadata(folder, change)
    (folder / "__0_0.distcp").write_bytes(data)


def test_other_learning_rates_are_said(tmp_path):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(plain_state(), checkpoint_id=tmp_path, no_dist=True)
    model = build(8, 32, False)
    optimizer = optimizer_of(model)
    with warnings.catch_warnings(action="error"):
        import_dcp(model, tmp_path, optimizer)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.5
    with pytest.warns(UserWarning, match=r"learning rates \[0.01\].*not restored.* keeps \[0.5\]"):
        import_dcp(model, tmp_path, optimizer)


class Evil:
    def __reduce__(self):
        return os.system, ("echo run > /dev/null",)


FILES = {
    "offset": (lambda f: change_metadata(f, move_a_chunk), "of model.norm.weight do not cover"),
    "bytes": (lambda f: change_metadata(f, swap_bytes), "which is not that of model"),
    "outside": (lambda f: change_metadata(f, leave_the_folder), "outside the folder"),
    "flipped": (flip, "checksum does not|cannot be read at byte"),
    "no file": (lambda f: (f / "__0_0.distcp").unlink(), "cannot be read"),
    "no metadata": (lambda f: (f / ".metadata").unlink(), "one finished checkpoint"),
    "evil": (lambda f: (f / ".metadata").write_bytes(pickle.dumps(Evil())), "refers to .*system"),
}
WORDS = {name: words for name, (_, words) in (STATES | FILES).items()}


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory):
    """A folder with a checkpoint that is refused for each of `WORDS`."""
    root = tmp_path_factory.mktemp("spoiled")
    states = {tied: plain_state(tied) for tied in (False, True)}
    for name in WORDS:
        state = copy.deepcopy(states[name == "untied"])
        if name in STATES:
            STATES[name][0](state)
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state, checkpoint_id=root / name, no_dist=True)
        if name in FILES:
            FILES[name][0](root / name)
    return root


def refuse(root, names, layout):
    manager = grid(layout)
    models = {}
    for tied in (False, True):
        model = parallelize(build(8, 32, tied), manager, rehearse=False)
        models[tied] = model, optimizer_of(model)
    for name in names:
        model, optimizer = models[name == "untied"]
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        with pytest.raises(CheckpointError, match=WORDS[name]) as caught:
            import_dcp(model, root / name, optimizer)
        assert isinstance(caught.value, DamagedCheckpointError) == (name in FILES), name
        torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before)
    model, optimizer = models[False]
    import_dcp(model, root / "number")  # the way out
    destroy_process_group_manager()


def test_folders_that_do_not_fit_are_refused_on_every_rank(four, spoiled):
    four.run(refuse, spoiled, [*WORDS], (1, 2, 1, 2))
