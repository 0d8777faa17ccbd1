"""Where faults are born: in the library, in users' modules, and nowhere on sound runs."""

import shutil

import pytest
import torch
from mutants import MUTANTS
from mutants.locating import is_located, locate_all, place_of, with_places
from sound_runs import campaign
from sweeps import today
from torch import nn
from torch.nn import functional as F

from scaletorch.bisect import compare, describe_grid, record
from scaletorch.bisect.__main__ import main
from scaletorch.dist import all_reduce, get_rank, get_world_size
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks

# A fault of each direction; `hatch run mutants --locate` tries all.
CHOSEN = (
    "partial-sums-not-reduced",
    "late-weight-gradient-incomplete",
    "positions-of-first-shard",
    "buckets-not-reduced",
    "tied-gradients-summed-twice",
    "moments-forgotten",
)


@pytest.mark.timeout(300)
def test_planted_faults_are_located():
    chosen = [MUTANTS[name] for name in (*CHOSEN[:1], *today(CHOSEN[1:], 4))]
    found = locate_all(chosen, steps=2)
    wrong = {m.name: place_of(found[m.name]) for m in chosen if not is_located(m, found[m.name])}
    assert not wrong
    sums = found["partial-sums-not-reduced"]
    assert "a sum over tp is missing" in str(sums)
    assert sums.found[0].birth.modules == ["embed_tokens"]
    assert not is_located(MUTANTS["buckets-not-reduced"], sums)
    table = with_places("| mutant | a |\n| --- | --- |\n| partial-sums-not-reduced | b |\n", found)
    assert table.splitlines()[2] == "| partial-sums-not-reduced | b | forward: embed_tokens |"


# Places in sound_runs.LAYOUTS: several stages on a rank; sequence parallelism beside replicas.
@pytest.mark.parametrize(("layout", "dtype"), [(5, "float64"), (16, "float32")])
def test_nothing_is_reported_of_a_sound_run_and_everything_was_compared(layout, dtype):
    (ran,) = campaign(["llama"], [dtype], [layout], steps=1)
    assert ran.sound, f"{ran.case}: {ran.report}"
    assert ran.report.count("good") == len(ran.report.judged) > 600, ran.case
    assert "no result of the training differs" in str(ran.report)


class Mixing(nn.Module):
    """Lets a token depend on rows or positions that another rank may have."""

    def __init__(self, inner, call):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return self.call(self.inner, x)


FAULTS = {  # what it mixes, the axis that must not be divided, and the module to blame
    "positions from 0": (
        lambda: Mixing(nn.Embedding(64, 8), lambda table, x: x + table(torch.arange(x.shape[1]))),
        "positions", "1",
    ),
    "batch norm": (lambda: Mixing(nn.BatchNorm1d(8), lambda f, x: f(x.mT).mT), "rows", "1.inner"),
}  # fmt: skip


def train(folder, kind, axis=""):
    """Record one step of a model, its batch divided along an axis over ranks or micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 8), FAULTS[kind][0](), nn.Linear(8, 32)).double()
    ids = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))
    dim = {"": 0, "rows": 0, "positions": 1}[axis]
    length = (4, 8)[dim]
    shares = torch.arange(length).chunk(2 if axis else 1)
    own = shares if get_world_size() == 1 else shares[get_rank() :][:1]
    describe = {axis: ([share.tolist() for share in own], length)} if axis else None
    with record(folder, model, describe=describe) as tape:
        total = torch.zeros((), dtype=torch.float64)
        for share in own:
            inputs, labels = (part.index_select(dim, share) for part in (ids[:, :-1], ids[:, 1:]))
            logits = model(inputs).flatten(0, 1)
            loss = F.cross_entropy(logits, labels.flatten(), reduction="sum") / 32
            loss.backward()
            total += loss.detach()
        for each in (total, *(parameter.grad for parameter in model.parameters())):
            all_reduce(each)
        tape.put("loss", total)


@pytest.mark.parametrize(("kind", "ranks"), [("positions from 0", 2), ("batch norm", 1)])
def test_silent_faults_of_plain_modules_are_located(tmp_path, kind, ranks):
    """Over two ranks, or over two micro-batches of one."""
    _, axis, module = FAULTS[kind]
    train(tmp_path / "one", kind)
    run_ranks(train, ranks, tmp_path / "two", kind, axis, init=ranks > 1)
    report = compare(tmp_path / "one", tmp_path / "two")
    birth = report.found[0].birth
    assert (birth.direction, birth.modules) == ("forward", [module]), str(report)
    assert axis in str(report) or kind == "batch norm"


def step(folder, *, seed=0, sizes=(8, 8), fails=False):
    """Record a step of a small model in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, sizes[0]), nn.Linear(*sizes), nn.Linear(sizes[1], 32))
    model = model.double()
    ids = torch.randint(32, (4, 8), generator=torch.Generator().manual_seed(seed))
    with record(folder) as tape:
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        if fails:
            raise OSError("disk on fire")
        tape.put("loss", loss)
        loss.backward()
        optimizer = torch.optim.AdamW(model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    step(folder)
    return folder


def test_recording_leaves_nothing_behind(one, tmp_path):
    call, clip = nn.Module.__call__, torch.nn.utils.clip_grad_norm_
    model = step(tmp_path / "two")
    assert nn.Module.__call__ is call
    assert torch.nn.utils.clip_grad_norm_ is clip
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(OSError, match="disk on fire"):
        step(tmp_path / "failed", fails=True)
    assert nn.Module.__call__ is call
    with pytest.raises(InvalidArgumentError, match="the recorded step failed: OSError: disk on"):
        compare(one, tmp_path / "failed")
    report = compare(one, tmp_path / "two")
    assert report.sound
    kinds = {"forward", "backward", "start", "loss", "gradient", "norm", "weight"}
    assert {key.kind for key in report.judged} == kinds


def replace(folder, old, new):
    (index,) = folder.glob("*.json")
    index.write_text(index.read_text().replace(old, new))


def truncate(folder, pattern, size):
    (path,) = folder.glob(pattern)
    path.write_bytes(path.read_bytes()[:size])


def add_a_rank_of_another_run(folder):
    for suffix in (".json", ".bin"):
        shutil.copy(folder / f"step0.rank0{suffix}", folder / f"step0.rank1{suffix}")
    index = folder / "step0.rank1.json"
    index.write_text(index.read_text().replace('"rank": 0', '"rank": 1'))
    other = index.read_text().replace('"rank": 1', '"rank": 0')
    (folder / "step0.rank0.json").write_text(other.replace('"world_size": 1', '"world_size": 2'))


INCOMPLETE = {
    "none": (shutil.rmtree, "has no recording"),
    "torn": (lambda f: truncate(f, "*.bin", -64), r"is incomplete: it has \d+ bytes, and \d+ were"),
    "a rank": (
        lambda f: replace(f, '"world_size": 1', '"world_size": 2'),
        r"\[0\], recorded by \[2\] ranks",
    ),
    "two runs": (add_a_rank_of_another_run, r"recorded by \[1, 2\] ranks: record"),
    "half an index": (lambda f: truncate(f, "*.json", 500), "is not the index of a recording"),
    "no index": (lambda f: next(f.glob("*.json")).unlink(), "ended before the recording"),
    "version": (lambda f: replace(f, '"version": ', '"version": 9'), r"has version 9\d, this"),
}


@pytest.mark.parametrize("kind", INCOMPLETE)
def test_what_cannot_be_compared_is_refused(one, tmp_path, kind):
    spoil, message = INCOMPLETE[kind]
    shutil.copytree(one, tmp_path / "other")
    spoil(tmp_path / "other")
    with pytest.raises(InvalidArgumentError, match=message):
        compare(one, tmp_path / "other")


def test_another_batch_and_other_sizes_are_named(one, tmp_path):
    step(tmp_path / "batch", seed=1)
    assert compare(one, tmp_path / "batch").found[0].birth.direction == "data"
    step(tmp_path / "sizes", sizes=(8, 12))
    other = str(compare(one, tmp_path / "sizes"))
    assert "1.weight before the step: shards of [(12, 8)] fit no place in [(8, 8)]" in other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": [nn.Linear(2, 2)]}, r"not a list; for a stage of a pipeline, pass its"),
        ({"describe": {"rows": 3}}, r'describe\["rows"\] must be'),
        ({"describe": {"rows": ([], 4)}}, r'describe\["rows"\] must be'),
        ({"describe": {"rows": (range(2), "x")}}, r'describe\["rows"\] must be'),
        ({}, "takes a tensor, not a NoneType"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with (
        pytest.raises(InvalidArgumentError, match=message),
        record(tmp_path, **arguments) as tape,
    ):
        tape.put("loss", None)


def test_a_grid_needs_micro_batches_that_were_sharded():
    with pytest.raises(TypeError, match="what shard_global_batch returned, not a dict"):
        describe_grid(None, [{}], None)


class Side(nn.Module):
    """A float32 output that does not enter the loss."""

    def __init__(self, factor=1.0):
        super().__init__()
        self.layer, self.side = nn.Linear(4, 4).double(), nn.Linear(4, 2)
        self.factor = factor

    def forward(self, x):
        return self.factor * self.layer(x), self.side(x.float())


def test_rounding_of_a_coarser_side_output_hides_no_fault(tmp_path):
    for name, factor in (("one", 1.0), ("wrong", 1 + 1e-6)):
        torch.manual_seed(0)
        model, x = Side(factor), torch.randn(4, 4).double()
        with record(tmp_path / name, model) as tape:
            loss = model(x)[0].square().sum()
            loss.backward()
            tape.put("loss", loss)
    assert compare(tmp_path / "one", tmp_path / "wrong").found[0].birth.direction == "forward"


def test_calls_under_no_grad_are_counted_apart(tmp_path):
    """An evaluation before the step has other micro-batches than it."""
    for name, parts, factor in (("one", 1, 1.0), ("two", 2, 1.0), ("wrong", 2, 1.1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
        x = torch.randn(4, 4).double()
        if factor != 1:
            model[1].register_forward_hook(lambda _, __, out: 1.1 * out)
        rows = torch.arange(4).chunk(parts)
        describe = {"rows": ([each.tolist() for each in rows], 4)}
        with record(tmp_path / name, model, describe=describe if parts > 1 else None) as tape:
            with torch.no_grad():
                for each in rows:
                    model(x[each])
            losses = [model(x[each]).square().sum() for each in rows]
            sum(losses).backward()
            tape.put("loss", sum(losses))
    assert compare(tmp_path / "one", tmp_path / "two").count("bad") == 0
    assert compare(tmp_path / "one", tmp_path / "wrong").found[0].birth.modules == ["1"]


def test_a_command_says_where(tmp_path, capsys):
    options = ["--layout", "2x1x1x1", "--steps", "1", "--model", "small_models:UnlikeOnRanks"]
    keep = ["--keep", str(tmp_path / "bad")]
    assert main(["run", *options, *keep]) == 1
    text = capsys.readouterr().out
    assert text.startswith("1. output of the model, step 0: off by ")
    assert "born in forward: the model itself" in text
    assert "rank 1 has 1.000001 times the right values" in text
    stages = ["--layout", "1x2x1x1", "--steps", "1", "--model", "small_models:small_model"]
    assert main(["run", *stages, "--keep", str(tmp_path / "good")]) == 0
    folders = [str(tmp_path / name / "layout") for name in ("good", "bad")]
    capsys.readouterr()
    assert main(["compare", *folders]) == 1  # two layouts, of which neither is one process
    other = capsys.readouterr().out
    assert other.splitlines()[1:4] == text.splitlines()[1:4]
    assert main(["compare", str(tmp_path / "no"), str(tmp_path)]) == 2
    assert "has no recording" in capsys.readouterr().err
