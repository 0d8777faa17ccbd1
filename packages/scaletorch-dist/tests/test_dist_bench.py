"""`python -m scaletorch.dist.bench`: sizes, factors, constants, files."""

import json
import runpy
import sys
import warnings

import pytest

from scaletorch.dist import InvalidArgumentError
from scaletorch.dist.bench import (
    CASES,
    Row,
    constants,
    fit,
    main,
    size,
    sizes_between,
)
from scaletorch.dist.testing import run_ranks

BENCH = "scaletorch.dist.bench"
QUICK = ["--max-size", "64K", "--factor", "100", "--seconds", "0.01"]


def test_sizes():
    assert sizes_between(8, 1024, 8) == [8, 64, 512, 1024]
    assert sizes_between(8, 8, 2) == [8]
    for bad in ((0, 8, 2), (8, 4, 2), (8, 64, 1)):
        with pytest.raises(InvalidArgumentError, match="sizes must grow"):
            sizes_between(*bad)
    assert [size(text) for text in ("8", "64K", "1MiB", "2g")] == [8, 65536, 1 << 20, 2 << 30]
    assert CASES["all_reduce"].size(9, 4) == 12
    assert CASES["all_gather"].size(8, 4) == 16


def test_constants_are_fitted_and_predict_another_number_of_ranks():
    sizes = [8, 1000, 10**6, 10**8]
    assert fit(sizes, [1e-5 + 2e-9 * x for x in sizes]) == pytest.approx((1e-5, 2e-9))
    assert fit(sizes, [1e-9 * x for x in sizes]) == pytest.approx((0, 1e-9), abs=1e-12)
    assert fit([8], [3e-5]) == (3e-5, 0)
    assert fit(sizes, [4e-5, 3e-5, 2e-5, 1e-5])[1] == 0  # quicker with size: no bandwidth
    assert [CASES[name].steps(4) for name in ("all_reduce", "all_gather", "broadcast")] == [6, 3, 2]
    rows = [Row("all_reduce", x, 6e-5 + 3e-9 * x, 0, 0, 1) for x in (8, 10**4, 10**7)]
    found = constants(rows, 4)["all_reduce"]
    assert found["alpha_step"] == pytest.approx(1e-5)
    assert found["beta_bus"] == pytest.approx(2e-9)


def test_a_whole_run_prints_a_table_and_writes_json(tmp_path, monkeypatch, capfd):
    """As `python -m scaletorch.dist.bench`, in a process that has torch already."""
    data = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["bench", "--ranks", "2", *QUICK, "--json", str(data)])
    with warnings.catch_warnings(action="ignore"):  # runpy's, of a module that is imported already
        runpy.run_module(BENCH, run_name="__main__", alter_sys=True)
    text = capfd.readouterr().out
    written = json.loads(data.read_text())
    assert set(written["constants"]) == set(CASES) == {row["call"] for row in written["rows"]}
    assert all(f"\n{name} " in text for name in CASES)
    assert written["conditions"]["ranks"] == 2
    for row in written["rows"]:
        assert row["algorithm_bandwidth"] == pytest.approx(row["size"] / row["seconds"])
    assert [row["size"] for row in written["rows"][:3]] == [8, 800, 65536]


def test_a_launchers_ranks_write_one_file(tmp_path, capfd):
    data = tmp_path / "four.json"
    words = [*QUICK, "--backend", "gloo", "--calls", "all_reduce", "--json", str(data)]
    run_ranks(main, 4, words, init=False)
    assert json.loads(data.read_text())["conditions"]["ranks"] == 4
    assert capfd.readouterr().out.count("time µs") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "or give --ranks"),
        (["--ranks", "2", "--max", "many"], "is not a size; write 8, 64K"),
        (["--ranks", "2", "--min", "1M", "--max", "1K"], "sizes must grow"),
        (["--ranks", "1"], "the group has 1"),
    ],
)
def test_mistakes_are_told(arguments, message, capfd, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code
    assert message in capfd.readouterr().err
