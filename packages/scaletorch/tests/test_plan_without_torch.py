"""Once a model is described, plans are arithmetic: made where torch cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scaletorch.plan import Affine, Behaviour, Block, Cut, Description, Parameter, Sent, Work
from scaletorch.plan.files import write

RANKS, ROWS, MEMORY = 32, 64, 2**25
WITHOUT = """
import sys

sys.modules["torch"] = None
exec(open(sys.argv[1]).read())
assert sys.modules["torch"] is None
assert not [name for name in sys.modules if name.startswith("torch.")]
"""
WITH = "import sys, torch; exec(open(sys.argv[1]).read())"
PROGRAM = f"""
import json
from dataclasses import replace
from pathlib import Path
from scaletorch.plan import cluster_named, plan, time
from scaletorch.plan.__main__ import main
from scaletorch.plan.files import read, write_cluster

known, cluster = read(Path("model.json")), cluster_named("dgx-a100", {RANKS})
cluster = replace(cluster, device=replace(cluster.device, memory={MEMORY}, group_memory=0))
write_cluster(cluster, Path("small.json"))
found = plan(known, {ROWS}, cluster)
best = found.best()
print(len(found.estimates), len(found.refused), json.dumps(best.as_json()))
print([each.peak for each in found.estimates[:50]], time(known, best.layout, cluster))
words = "--description model.json --ranks {RANKS} --rows {ROWS} --cluster small.json".split()
assert main([*words, "--json", "p.json", "--html", "p.html"]) == 0
grid = best.layout.grid
assert main([*words, "--explain", f"{{grid.dp}}x{{grid.pp}}x{{grid.cp}}x{{grid.tp}}"]) == 0
"""


def kind(width: int, cut: Cut) -> Behaviour:
    """Return a block of some width, of which each rank has its share, and experts of its own."""
    share = cut.tp * cut.cp
    own = width * width // (cut.ep if cut.ep > 1 else cut.tp)
    sent = (
        Sent("tp", "all_reduce", "forward", 2, Affine(0, 9000)),
        Sent("cp", "ring", "backward", 1, Affine(0, 5000)),
        Sent("ep", "all_to_all", "forward", 2, Affine(0, 7000)),
    )
    return Behaviour(
        (
            Parameter("w", width * width, 4, width * width // cut.tp),
            Parameter("e", width * width, 4, own, expert=True),
        ) if cut.ep > 1 else (Parameter("w", width * width, 4, own),),
        kept=Affine(8, 9000 // share), handed=Affine(0, 4000 // cut.cp), entered=Affine(0, 400),
        forward_peak=Affine(0, 7000), backward_peak=Affine(64, 9000),
        sent=tuple(each for each in sent if getattr(cut, each.axis) > 1),
        work=(Work("matmul", 2, Affine(0, 1e7 * width / share), Affine(0, 1e4)),),
    )  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the description of a model of 32 layers."""
    blocks = (
        Block("embed", 0, "first"),
        *(Block(f"layers.{at}", 1, "layer") for at in range(32)),
        Block("head", 2, "last"),
    )
    cuts = [
        Cut(tp, cp, ep=ep, cp_method="ring" if cp > 1 else "")
        for tp in (1, 2) for cp in (1, 2) for ep in (1, 2)
    ]  # fmt: skip
    known = {cut: tuple(kind(width, cut) for width in (400, 200, 400)) for cut in cuts}
    tied = (("0.w", "2.w"),)
    write(Description("tall", 64, "float32", blocks, known, tied=tied), tmp_path / "model.json")
    return tmp_path


def test_a_plan_of_a_description_is_made_without_torch_and_is_the_same(folder: Path) -> None:
    (folder / "program.py").write_text(PROGRAM)
    there = {}
    for start in (WITHOUT, WITH):
        done = subprocess.run(
            [sys.executable, "-c", start, "program.py"], cwd=folder,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        files = tuple((folder / f"p.{kind}").read_text() for kind in ("json", "html"))
        there[start] = done.stdout, files
    without, beside = there.values()
    assert without == beside
    said, (content, page) = without
    fitting = json.loads(content)["estimates"]
    assert len(fitting) > 50
    assert {1, 2} <= {each["layout"]["grid"]["ep"] for each in fitting}
    assert len({each["layout"]["grid"]["pp"] for each in fitting}) > 3
    assert f"on {RANKS} x A100-SXM-80GB, 32 MiB each" in said
    assert "memory of each rank of the pipeline" in said
    assert page.startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["describe", "calibrate", "usual_cuts"])
def test_what_runs_models_needs_torch_and_says_so(name: str) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\nimport scaletorch.plan\n"
        f"try: scaletorch.plan.{name}\nexcept ImportError as error: print(error.name)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("torch\n", "")


def test_siblings_of_another_series_are_refused_without_torch_too() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "import scaletorch.parallel.pipeline_parallel._version as pp; pp.__version__ = '0.99.0'\n"
        "from scaletorch.dist.errors import VersionMismatchError\n"
        "try: import scaletorch.plan\n"
        "except VersionMismatchError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "works with scaletorch-pp~=" in done.stdout
    assert "and scaletorch-pp 0.99.0 is beside it" in done.stdout
