"""Entries that others add to the table of devices, and backends as users write them."""

import sys
from pathlib import Path

import pytest
import torch

import scaletorch.dist as dist
from scaletorch.dist import InvalidArgumentError, devices
from scaletorch.dist.devices import DeviceEntry, register_device, table
from scaletorch.dist.startup import creators
from scaletorch.dist.testing import distributed_test

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
    assert "torch_tpu is not installed; it comes from the maker's site" in devices.backend_problem(
        "tccl"
    )
    with pytest.warns(RuntimeWarning, match="backend 'tccl' cannot be used.*Using '.*' instead"):
        creators.choose_backend("tccl")


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


def install(folder, name, value):
    """A package with an entry point, as pip would leave it."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[scaletorch.devices]\n{name} = {value}\n")


def test_entry_points_are_loaded_when_devices_are_asked_for(fresh, monkeypatch, tmp_path):
    (tmp_path / "their_devices.py").write_text(
        "from scaletorch.dist.devices import DeviceEntry\n"
        "ONE = DeviceEntry('tpu', 'tccl')\n"
        "TWO = DeviceEntry('vpu', 'vccl')\n"
    )
    (tmp_path / "their_copy.py").write_text("class DeviceEntry: pass\nENTRY = DeviceEntry()\n")
    install(tmp_path, "one", "their_devices:ONE")
    install(tmp_path, "two", "their_devices:TWO")
    install(tmp_path, "copy", "their_copy:ENTRY")  # of a vendored copy: not ours
    install(tmp_path, "number", "math:pi")
    install(tmp_path, "absent", "no_such_module:ENTRY")
    monkeypatch.syspath_prepend(tmp_path)
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
    assert devices.backend_problem("tccl") == (
        "backend 'tccl' does not start (ZeroDivisionError: division by zero)"
    )


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
        creators.choose_backend(backend)


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
