"""Vendors' devices by a stand-in: PrivateUse1 on host memory, and gloo under the backend's name.

Its memory is at addresses that the host cannot use. It refuses the operations that a vendor's
library lacks and, by the table, the dtypes of reductions. It shows that the plugin is imported
late, the device chosen, the backend picked and its lacks gone round. It says nothing about the
vendors' own libraries, on which none of this was run.
"""

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as c10d

import scaletorch.dist as dist
from scaletorch.dist import devices, functional
from scaletorch.dist.building import all_reduce_flat, even_counts, reduce_scatter_flat
from scaletorch.dist.devices import entry_of_backend
from scaletorch.dist.devices.current import synchronize
from scaletorch.dist.devices.table import REDUCED
from scaletorch.dist.testing import distributed_test, run_ranks

FOLDER = Path(__file__).parent
VENDORS = [("npu", "hccl"), ("mlu", "cncl"), ("musa", "mccl")]

pytestmark = pytest.mark.timeout(500)  # the first test builds the stand-in: a minute, or more


@pytest.fixture(autouse=True)
def plugins(standin, monkeypatch):
    """Ranks find the vendors' plugins; this process never imports them."""
    monkeypatch.syspath_prepend(standin / "plugins")
    monkeypatch.syspath_prepend(FOLDER)
    yield
    assert not {f"torch_{device}" for device, _ in VENDORS} & {*sys.modules}


def join(device, backend, asked=None):
    """What `init_dist` does with a vendor's backend."""
    assert f"torch_{device}" not in sys.modules
    dist.init_dist("pytorch", backend=asked or backend, timeout=200)
    rank = dist.get_rank()
    own = torch.device(device, rank)
    assert f"torch_{device}" in sys.modules
    assert c10d.get_backend_config() == f"cpu:gloo,{device}:{backend}"
    assert dist.get_backend() == backend
    assert devices.current_device() == dist.get_comm_device() == own
    assert devices.default_entry().backend == backend
    assert torch.empty(1, device=device).device == own
    assert dist.get_timeout().total_seconds() == 200
    synchronize()
    return own


@pytest.mark.parametrize(("device", "backend"), VENDORS)
@distributed_test(world_size=2, init=False, timeout=300)
def test_a_vendors_device_does_what_gloo_does(device, backend):
    import every_backend

    own = join(device, backend)
    move_data(own, device, backend)
    reduce_every_dtype(own, backend)
    if backend == "hccl":  # the others lack no more: of dtypes, the table knows
        every_backend.run_all(own)
        for name in ("train_with_ddp", "use_device_mesh", "train_with_dtensors"):
            getattr(every_backend, name)(device)
    dist.barrier()


@distributed_test(world_size=2, init=False, timeout=300)
def test_gloo_gets_copies_of_what_is_on_a_device():
    importlib.import_module("torch_npu")
    import every_backend

    dist.init_dist("pytorch", backend="gloo", timeout=200)
    every_backend.run_all(torch.device("npu", dist.get_rank()))


def move_data(own, device, backend):
    """CPU tensors go by gloo, and neither AVG nor gather is asked of the backend."""
    rank = dist.get_rank()
    host = torch.tensor([float(rank)])
    dist.all_reduce(host)
    assert (host.device.type, host.item()) == ("cpu", 1.0)
    there = host.to(own)
    dist.all_reduce(there, "mean")
    assert (there.device, there.item()) == (own, 1.0)
    parts = dist.gather(there + rank, 1)
    assert [part.item() for part in parts] == ([1.0, 2.0] if rank == 1 else [])
    assert all(part.device == own for part in parts)
    bits = torch.tensor([5 + rank], device=own)
    dist.all_reduce(bits, "band")
    assert bits.item() == 4
    with pytest.raises(RuntimeError, match="does not support gather"):
        c10d.gather(there, [there.clone(), there.clone()] if rank == 0 else None)
    results = dist.collect_results([rank, rank + 10], 4, device=device)
    assert results == ([0, 1, 10, 11] if rank == 0 else None)
    group = c10d.new_group([0, 1], backend=f"{device}:{backend}")  # no CPU in it: tensors go there
    dist.broadcast(host, 1, group)
    assert (host.device.type, host.item()) == ("cpu", 1.0)
    assert dist.all_gather_object({"rank": rank}, group) == [{"rank": 0}, {"rank": 1}]


FINE = [2.0**40 + 2.0**-8, float("nan")]  # more digits than float32 has


def reduced(data, op):
    """Each rank's data is reduced in every way that the package has."""
    rank, size, everywhere = dist.get_rank(), dist.get_world_size(), data.clone()
    dist.all_reduce(everywhere, op)
    to_one = data.clone()
    dist.reduce(to_one, 1, op)
    assert torch.equal(to_one.cpu().isnan(), (everywhere if rank == 1 else data).cpu().isnan())
    scattered = torch.empty_like(data)
    dist.reduce_scatter(scattered, [data] * size, op)
    for found in (scattered, to_one if rank == 1 else everywhere):
        assert found.dtype == data.dtype
        torch.testing.assert_close(found.cpu(), everywhere.cpu(), rtol=0, atol=0, equal_nan=True)
    return everywhere.tolist()


def reduce_every_dtype(own, backend):
    """What a vendor does not reduce is reduced here."""
    rank = dist.get_rank()
    taken = entry_of_backend(backend).reduces
    for dtype in REDUCED:
        data = torch.ones(2, dtype=dtype, device=own)
        if dtype in taken:
            c10d.all_reduce(data)
            assert data.tolist() == [2, 2]
            continue
        with pytest.raises(RuntimeError, match=f"the stand-in's {backend} reduces no"):
            c10d.all_reduce(data)
    fine = torch.tensor(FINE, dtype=torch.float64, device=own) * (1 + rank)
    assert [str(x) for x in reduced(fine, "sum")] == [str(3 * FINE[0]), "nan"]
    assert [str(x) for x in reduced(fine, "max")] == [str(2 * FINE[0]), "nan"]
    assert [str(x) for x in reduced(-fine, "min")] == [str(-2 * FINE[0]), "nan"]
    assert reduced(torch.tensor([200 + rank], dtype=torch.uint8, device=own), "sum") == [145]
    assert reduced(torch.tensor([rank == 1, False], device=own), "sum") == [True, False]
    twos = torch.full((2,), 2.0, dtype=torch.bfloat16, device=own)
    assert reduced(twos, "product") == [4.0, 4.0]
    pair = torch.complex(fine[:1], fine[:1])
    dist.all_reduce(pair)
    assert pair.tolist() == [complex(3 * FINE[0], 3 * FINE[0])]


def sums_of_16_bits(device, backend):
    """Sum flat buffers; the backend's own sums of 16-bit floats are refused."""
    own = join(device, backend, f"cpu:gloo,{device}:{backend}")
    rank, size = dist.get_rank(), dist.get_world_size()
    named = ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
    calls = {name: getattr(c10d, name) for name in named if hasattr(c10d, name)}

    def refuse(call, *args, **options):
        dtypes = {getattr(x, "dtype", None) for x in args}
        assert not dtypes & {torch.bfloat16, torch.float16}
        return call(*args, **options)

    refused = {name: partial(refuse, call) for name, call in calls.items()}
    for dtype in (torch.bfloat16, torch.float16):
        rows = torch.randn(size, 12, generator=torch.Generator().manual_seed(0)).to(dtype)
        exact = rows[0].float()
        for row in rows[1:]:
            exact += row
        for op in ("sum", "mean"):
            expected = exact if op == "sum" else exact / size
            for elements in (12, 10):  # shards of one length, and not
                data = rows[rank, :elements].to(own)
                counts = even_counts(elements, size)
                with patch.multiple(c10d, **refused):
                    shard = reduce_scatter_flat(data, counts, op).wait()
                    total = all_reduce_flat(data, op).wait()
                assert (total.dtype, total.device) == (dtype, own)
                assert torch.equal(total.cpu(), expected[:elements].to(dtype))
                assert shard.dtype == torch.float32
                assert torch.equal(shard.cpu(), expected[:elements].split(counts)[rank])
    return torch.equal(rounding(rows), exact.to(dtype))


def rounding(rows):
    """Return the sum as a ring makes it that rounds at each rank."""
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


def test_16_bits_of_gradients_are_summed_in_float32():
    assert not any(run_ranks(sums_of_16_bits, 4, "mlu", "cncl", init=False, timeout=200))


@distributed_test(world_size=2, init=False, timeout=200)
def test_sums_of_the_host_are_exact_on_a_device_without_float64():
    os.environ["STANDIN_NARROW"] = "1"
    device, backend = "mlu", "cncl"
    own = join(device, backend)
    group = c10d.new_group([0, 1], backend=f"{device}:{backend}")
    counted = torch.tensor([2.0**30 + 1], dtype=torch.float64)
    dist.all_reduce(counted, group=group)
    assert counted.tolist() == [2.0**31 + 2]
    dist.reduce(counted, 1, "max", group=group)
    assert functional.all_reduce(counted, group).tolist() == [2.0**32 + 4]
    narrow = torch.tensor([2.0**30 + 1], dtype=torch.float64, device=own)
    dist.all_reduce(narrow)
    assert narrow.tolist() == [2.0**31]  # so the device's own float64 are no wider than float32
