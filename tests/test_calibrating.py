"""A machine is measured as a cluster, on which a step is planned."""

from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
from benchmarks import calibrating
from benchmarks.known import Sizes, transformer

from scaletorch.dist import launch
from scaletorch.parallel.pg_manager import Grid
from scaletorch.plan import Layout, read_cluster, time, write_cluster


def in_small(measure, *given):
    """Measure little, so that it takes seconds."""
    sizes = {"cpu": (16, (16, 32), (16, 32), (2**6, 2**10))}
    with patch.multiple(calibrating, SIZES=sizes, UPDATED=2**6):
        return measure(*given)


@pytest.mark.timeout(300)
def test_this_machine_is_measured(tmp_path, monkeypatch):
    """What two ranks reach is no matter here: that all of it is measured, and a step planned."""

    def launched(measure, ranks, *given, **options):
        return launch(in_small, ranks, measure, *given, **options)

    monkeypatch.setattr(calibrating, "launch", launched)
    found = in_small(partial(calibrating.calibrate, 2, seconds=1e-4))
    write_cluster(found, tmp_path / "here.json")
    assert read_cluster(tmp_path / "here.json") == found
    device = found.device
    assert device.flops.keys() == {"float32"}
    assert min(device.peak("float32"), device.moving, device.overhead, device.updating) > 0
    sorts = {"matmul", "matmul backward", "attention", "attention backward", "other"}
    assert device.efficiency.keys() == sorts
    assert max(share for pairs in device.efficiency.values() for _, share in pairs) == 1
    assert device.kernels == "cpu"
    assert found.links[0].ranks == 2
    layout = Layout(Grid(pp=2))
    described = transformer(Sizes("small", 64, 4, 4, 128, 32), [layout.cut])
    assert time(replace(described, dtype="float32"), layout, found).step > 0


def test_links_are_taken_as_the_bench_measured_them():
    constants = {
        "all_reduce": {"alpha_step": 1e-4, "beta_bus": 1e-9, "error": 0.1},
        "send_recv": {"alpha_step": 5e-5, "beta_bus": 5e-10, "error": 0.2},
        "broadcast": {"alpha_step": 1.0, "beta_bus": 1.0, "error": 9.0},
    }
    link = calibrating.link_of({"conditions": {"ranks": 4}, "constants": constants})
    assert (link.ranks, link.latency, link.bandwidth) == (4, 5e-5, pytest.approx(2e9))
    assert set(link.calls) == {"all_reduce", "send"}  # noise is left out
