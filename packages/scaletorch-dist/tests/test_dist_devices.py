"""The table of devices and backends, what others add to it, and what follows on this machine."""

import sys
import types
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, StateError, devices
from scaletorch.dist.building import map_tensors, tensors_in
from scaletorch.dist.devices import DeviceEntry, current, register_device, table
from scaletorch.dist.devices.current import synchronize
from scaletorch.dist.devices.table import DEVICES
from scaletorch.dist.startup.initialize import choose_backend
from scaletorch.dist.testing import distributed_test

Pair = namedtuple("Pair", "left right")
PLUGINS = [entry for entry in DEVICES if entry.plugin and entry.device != "cpu"]


def test_what_is_missing_says_where_it_comes_from():
    for entry in PLUGINS:
        problem = current.device_problem(entry)
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
    monkeypatch.setattr(table, "DEVICES", (replace(entry, nodes=str(node)), *DEVICES))
    with pytest.raises(StateError, match=f"has {entry.device} hardware.*It comes from "):
        choose_backend(entry.backend)


def test_a_plugin_that_does_not_import_is_told_apart(monkeypatch, tmp_path):
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no driver')")
    monkeypatch.syspath_prepend(tmp_path)
    problem = current.plugin_problem("broken_plugin")
    assert problem == "broken_plugin is installed but does not import (RuntimeError: no driver)"


def test_an_accelerator_is_chosen_by_local_rank(monkeypatch):
    module = types.SimpleNamespace(index=0, waits=[], is_available=lambda: True)
    module.device_count, module.current_device = lambda: 2, lambda: module.index
    module.set_device = lambda index: setattr(module, "index", index)
    module.synchronize = module.waits.append
    monkeypatch.setattr(torch, "cuda", module)
    assert devices.set_device(1) == torch.device("cuda", 1)
    assert devices.current_device() == torch.device("cuda", 1)
    synchronize()
    assert module.waits == [torch.device("cuda", 1)]
    assert devices.set_device(2) == torch.device("cuda", 0)  # as where a process sees one device
    assert devices.default_entry().device == "cuda"
    monkeypatch.setattr(c10d, "is_backend_available", lambda name: name in ("nccl", "gloo"))
    assert devices.default_backend() == "nccl"
    assert choose_backend("nccl") == "cpu:gloo,cuda:nccl"
    with pytest.warns(RuntimeWarning, match="Using 'nccl' instead"):
        assert choose_backend("hccl") == "cpu:gloo,cuda:nccl"


def test_the_cpu_is_a_device_like_any_other():
    if torch.cuda.is_available():
        pytest.skip("this machine has an accelerator")
    assert devices.set_device(5) == torch.device("cpu")
    assert devices.current_device() == dist.get_comm_device() == torch.device("cpu")
    synchronize()
    assert devices.default_backend() == "gloo"
    for backend in ("gloo", "cpu:gloo"):
        assert choose_backend(backend) == backend


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
    assert [x.max() for x in tensors_in(value)] == [1, 1, 1, 1, 1, 1, 4, 1], "the given must stay"
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


DOCS = Path(__file__).parents[3] / "docs" / "devices.md"
TPU = DeviceEntry("tpu", "tccl", "torch_tpu", frozenset({"gather"}), "the maker's site")


@pytest.fixture
def fresh(monkeypatch):
    """A table without what others added, that has not looked for entry points."""
    monkeypatch.setattr(table, "_added", [])
    table._load_entry_points.cache_clear()
    yield
    table._load_entry_points.cache_clear()


def test_an_entry_is_added_once_and_stands_before_the_cpu(fresh):
    register_device(TPU)
    register_device(TPU)
    entries = table.device_entries()
    assert entries.count(TPU) == 1
    assert [entry.device for entry in entries][:6] == ["cuda", "xpu", "npu", "mlu", "musa", "tpu"]
    assert devices.entry_of_backend("tccl") == TPU
    problem = devices.backend_problem("tccl")
    assert "torch_tpu is not installed; it comes from the maker's site" in problem
    with pytest.warns(RuntimeWarning, match="backend 'tccl' cannot be used.*Using '.*' instead"):
        choose_backend("tccl")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("npu", "expected a DeviceEntry, not a str"),
        (DeviceEntry("tpu", "tccl", lacks=frozenset({"al_gather"})), "'lacks' .*gather.*al_gather"),
        (DeviceEntry("tpu", "tccl", lacks="gather"), "field 'lacks' of the entry of 'tccl'"),
        (DeviceEntry("npu", "hccl"), "backend 'hccl' is in the table of devices already, as "),
    ],
)
def test_bad_entries_are_refused_by_field(fresh, entry, message):
    with pytest.raises(InvalidArgumentError, match=message):
        register_device(entry)
    assert not table._added


def test_entry_points_are_loaded_when_devices_are_asked_for(fresh, install, tmp_path):
    (tmp_path / "their_devices.py").write_text(
        "from scaletorch.dist.devices import DeviceEntry\n"
        "ONE = DeviceEntry('tpu', 'tccl')\n"
        "TWO = DeviceEntry('vpu', 'vccl')\n"
    )
    (tmp_path / "their_copy.py").write_text("class DeviceEntry: pass\nENTRY = DeviceEntry()\n")
    install("one", "their_devices:ONE")
    install("two", "their_devices:TWO")
    install("copy", "their_copy:ENTRY")  # of a vendored copy: not ours
    install("number", "math:pi")
    install("absent", "no_such_module:ENTRY")
    assert devices.entry_of_backend("gloo").device == "cpu"
    assert "their_devices" not in sys.modules  # the built-in entries need no look
    with pytest.warns(RuntimeWarning) as warned:
        assert devices.entry_of_backend("vccl").device == "vpu"
    assert sorted(entry.backend for entry in table._added) == ["tccl", "vccl"]
    texts = sorted(str(each.message) for each in warned)
    assert [text.partition(" gives no device: ")[2] for text in texts] == [
        "ModuleNotFoundError: No module named 'no_such_module'",
        "InvalidArgumentError: expected a DeviceEntry, not a float",
    ]
    assert texts[1].startswith("entry point 'number' (math:pi) of number in the group")
    assert devices.entry_of_backend("other") is None  # without another warning


def bring_backend():
    torch.distributed.Backend.register_backend(
        "tccl",
        lambda store, rank, size, timeout: torch.distributed.ProcessGroupGloo(store, rank, size),
        devices=["cpu"],
    )


@distributed_test(world_size=2, init=False)
def test_an_added_backend_is_activated_and_its_lacks_gone_round():
    register_device(DeviceEntry("cpu", "tccl", None, frozenset({"max"}), activate=bring_backend))
    dist.init_dist("pytorch", backend="tccl")
    assert dist.get_backend() == "tccl"
    data = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(data, "max")
    assert data.item() == 1


def test_a_backend_that_does_not_start_is_told(fresh):
    register_device(DeviceEntry("cpu", "tccl", activate=lambda: 1 / 0))
    problem = "backend 'tccl' does not start (ZeroDivisionError: division by zero)"
    assert devices.backend_problem("tccl") == problem


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("cpu:gloo,nccl", "cannot read backend 'cpu:gloo,nccl'"),
        ("cpu:", "cannot read backend 'cpu:'"),
        ("", "cannot read backend ''"),
        ("cpu:gloo,cpu:mpi", "names a device twice"),
        ("npu:gloo", "backend 'gloo' serves cpu and cuda tensors, not npu: write 'cpu:gloo'"),
        ("cpu:gloo,cuda:hccl", "backend 'hccl' serves npu tensors, not cuda: write 'npu:hccl'"),
        ("cpu:smoke", "unknown backend 'smoke'"),
    ],
)
def test_backends_that_make_no_sense_are_refused(backend, message):
    with pytest.raises(InvalidArgumentError, match=message):
        choose_backend(backend)


def test_mixed_backends_are_read_in_any_case():
    assert devices.resolve_backend("CPU:gloo, cuda:NCCL") == [("cpu", "gloo"), ("cuda", "nccl")]
    assert devices.resolve_backend("gloo") == [("", "gloo")]
    if not torch.distributed.is_mpi_available():
        assert devices.resolve_backend("mpi") == [("", "mpi4py")]


def test_the_docs_say_what_each_backend_lacks(fresh):
    if not DOCS.exists():
        pytest.skip("this wheel is tested alone")
    lines = DOCS.read_text().splitlines()
    for entry in table.device_entries():
        row = next(line for line in lines if f"| `{entry.backend}` | `{entry.device}` |" in line)
        lacks = row.split(" | ")[3].split(", ")
        assert set(lacks) - {"nothing"} == entry.lacks
