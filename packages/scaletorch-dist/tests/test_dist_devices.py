"""The table of devices and backends, and what follows from it on this machine."""

import types
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, StateError, devices
from scaletorch.dist.building import map_tensors, tensors_in
from scaletorch.dist.devices import DeviceEntry, probe, table
from scaletorch.dist.devices.current import synchronize
from scaletorch.dist.devices.table import DEVICES
from scaletorch.dist.startup import creators
from scaletorch.dist.testing import distributed_test

Pair = namedtuple("Pair", "left right")
PLUGINS = [entry for entry in DEVICES if entry.plugin and entry.device != "cpu"]


def test_what_is_missing_says_where_it_comes_from():
    for entry in PLUGINS:
        problem = probe.device_problem(entry)
        assert f"{entry.plugin} is not installed" in problem
        assert entry.source in problem
        assert devices.backend_problem(entry.backend) == problem
    if not c10d.is_mpi_available():
        assert "torch has no mpi" in devices.backend_problem("mpi")
    with pytest.raises(InvalidArgumentError, match=r"unknown backend 'gluu'.*cncl, gloo, hccl"):
        devices.backend_problem("gluu")


@pytest.mark.parametrize("entry", PLUGINS, ids=lambda entry: entry.device)
def test_hardware_without_its_plugin_is_an_error(monkeypatch, tmp_path, entry):
    node = tmp_path / "device0"
    node.touch()
    here = DeviceEntry(
        entry.device, entry.backend, entry.plugin, entry.lacks, entry.source, str(node)
    )
    monkeypatch.setattr(table, "DEVICES", (here, *DEVICES))
    with pytest.raises(StateError, match=f"has {entry.device} hardware.*It comes from "):
        creators.choose_backend(entry.backend)


def test_a_plugin_that_does_not_import_is_told_apart(monkeypatch, tmp_path):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    problem = probe.plugin_problem("broken_plugin")
    assert problem == "broken_plugin is installed but does not import (RuntimeError: no driver)"


def fake_accelerator(monkeypatch, device, count=2):
    """A module such as torch.cuda, for an accelerator with some devices."""
    module = types.SimpleNamespace(index=0, waits=[])
    module.is_available = lambda: True
    module.device_count = lambda: count
    module.current_device = lambda: module.index
    module.set_device = lambda index: setattr(module, "index", index)
    module.synchronize = module.waits.append
    monkeypatch.setattr(torch, device, module, raising=False)
    return module


def test_an_accelerator_is_chosen_by_local_rank(monkeypatch):
    module = fake_accelerator(monkeypatch, "cuda")
    assert devices.set_device(1) == torch.device("cuda", 1)
    assert devices.current_device() == torch.device("cuda", 1)
    synchronize()
    assert module.waits == [torch.device("cuda", 1)]
    assert devices.set_device(2) == torch.device("cuda", 0)  # as where a process sees one device
    assert devices.default_entry().device == "cuda"
    monkeypatch.setattr(c10d, "is_backend_available", lambda name: name in ("nccl", "gloo"))
    assert devices.default_backend() == "nccl"
    assert creators.choose_backend("nccl") == "cpu:gloo,cuda:nccl"
    with pytest.warns(RuntimeWarning, match="Using 'nccl' instead"):
        assert creators.choose_backend("hccl") == "cpu:gloo,cuda:nccl"


def test_the_cpu_is_a_device_like_any_other():
    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    assert devices.set_device(5) == torch.device("cpu")
    assert devices.current_device() == dist.get_comm_device() == torch.device("cpu")
    synchronize()
    assert devices.default_backend() == "gloo"
    for backend in ("gloo", "cpu:gloo"):
        assert creators.choose_backend(backend) == backend


@distributed_test(world_size=2, init=False)
def test_a_registered_backend_needs_no_plugin():
    """Gloo under a vendor's name."""

    def create(store, rank, size, timeout):
        return c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)

    c10d.Backend.register_backend("hccl", create, devices=["cpu"])
    dist.init_dist("pytorch", backend="hccl")
    assert dist.get_backend() == "hccl"
    assert dist.get_comm_device() == torch.device("cpu")
    data = torch.ones(1)
    dist.all_reduce(data)
    assert data.item() == 2


@distributed_test(world_size=2)
def test_what_a_group_communicates_with():
    assert dist.get_comm_device() == torch.device("cpu")
    group = c10d.new_group([0, 1], backend="cpu:gloo,cuda:gloo")
    assert dist.get_comm_device(group) == torch.device("cpu")
    assert dist.get_backend(group) == "gloo"


@dataclass
class Output:
    logits: object
    name: str = "an output"


@dataclass(frozen=True, slots=True)
class Frozen:
    left: object
    size: int = field(default=2, init=False)


def doubled(tensor):
    return 2 * tensor


def test_tensors_inside_are_found_and_changed_at_any_depth_in_containers_of_the_same_types():
    a, b, c = (torch.full((1,), float(value)) for value in range(3))
    value = {"first": [a, ("text", b)], "second": Output([c]), "class": Output}
    assert [float(tensor) for tensor in tensors_in(value)] == [0.0, 1.0, 2.0]
    one = torch.ones(1)
    largest = torch.tensor([[1, 2], [4, 3]]).max(1)  # a type of torch's own, of one argument
    value = {
        "first": [one, ("text", None)],
        "pair": Pair(one, torch.Size([2, 3])),
        "ordered": OrderedDict(a=one, b="text"),
        "default": defaultdict(list, a=one),
        "read-only": types.MappingProxyType({"a": one}),
        "class": Output([Frozen(one)]),
        "largest": largest,
    }
    found = map_tensors(doubled, value)
    assert [float(x) for x in tensors_in(value["first"])] == [1.0], "the given one must stay"
    assert found["first"] == [2.0, ("text", None)]
    assert found["first"] is not value["first"]
    assert found["pair"] == Pair(2.0, torch.Size([2, 3]))
    assert isinstance(found["pair"].right, torch.Size)
    assert found["ordered"] == OrderedDict(a=2.0, b="text")
    assert found["default"]["missing"] == []
    assert (type(found["read-only"]), found["read-only"]["a"]) == (types.MappingProxyType, 2.0)
    assert found["class"] == Output([Frozen(2.0)])
    assert (type(found["largest"]), found["largest"].values.tolist()) == (type(largest), [4, 8])
    assert map_tensors(doubled, "text") == "text"
