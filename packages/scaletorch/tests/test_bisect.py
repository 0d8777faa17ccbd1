"""Where faults are born: in the library, in users' modules, and nowhere on sound runs."""

import errno
import json

import pytest
import torch
from mutants import MUTANTS
from mutants.locating import is_located, locate_all, place_of, with_places
from sound_runs import campaign
from sweeps import today
from torch import nn
from torch.nn import functional as F

from scaletorch.bisect import compare, record
from scaletorch.bisect.__main__ import main
from scaletorch.bisect.comparison.judge import GOOD
from scaletorch.bisect.recording.folder import Writer
from scaletorch.dist import all_reduce, get_rank, get_world_size
from scaletorch.dist.errors import InvalidArgumentError
from scaletorch.dist.testing import run_ranks

# A fault of each direction; `hatch run mutants --locate` tries all.
CHOSEN = (
    "partial-sums-not-reduced",
    "late-weight-gradient-incomplete",
    "positions-of-first-shard",
    "buckets-not-reduced",
    "moments-forgotten",
    "dropout-alike-over-dp",
)


@pytest.mark.timeout(300)
def test_planted_faults_are_located():
    chosen = [MUTANTS[name] for name in (*CHOSEN[:1], *today(CHOSEN[1:], 5))]
    found = locate_all(chosen, steps=2)
    wrong = {m.name: place_of(found[m.name]) for m in chosen if not is_located(m, found[m.name])}
    assert not wrong
    sums = found["partial-sums-not-reduced"]
    assert "a sum over tp is missing" in str(sums)
    assert sums.found[0].birth.modules == ["embed_tokens"]
    assert not is_located(MUTANTS["buckets-not-reduced"], sums)
    table = with_places("| mutant | a |\n| --- | --- |\n| partial-sums-not-reduced | b |\n", found)
    assert table.splitlines()[2] == "| partial-sums-not-reduced | b | forward: embed_tokens |"


# Places in sound_runs.LAYOUTS: several stages on a rank; shares of sequences beside replicas.
@pytest.mark.parametrize(("layout", "dtype"), [(5, "float64"), (16, "float32")])
def test_nothing_is_reported_of_a_sound_run_and_everything_was_compared(layout, dtype):
    (ran,) = campaign(["llama"], [dtype], [layout], steps=1)
    assert ran.sound, f"{ran.case}: {ran.report}"
    assert ran.report.count(GOOD) == len(ran.report.judged) > 600, ran.case
    assert "no result of the training differs" in str(ran.report)


class Tokens(nn.Module):
    """A plain model of tokens that a subclass makes depend on the rest of the batch."""

    def __init__(self, mixed):
        super().__init__()
        self.embed = nn.Embedding(32, 8)
        self.mixed = mixed
        self.head = nn.Linear(8, 32)

    def forward(self, ids):
        return self.head(self.mixed(self.embed(ids)))


class OwnPositions(nn.Module):
    """Counts positions from the first one that it sees."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(64, 8)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))


class Convolution(nn.Module):
    """Looks at the position before each, and at nothing before the first that it sees."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 2)

    def forward(self, x):
        return x + self.conv(F.pad(x.mT, (1, 0))).mT


class Norm(nn.Module):
    """Takes statistics of the rows that it sees."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.norm(x.mT).mT


FAULTS = {
    "positions": (OwnPositions, "positions", "mixed"),
    "convolution": (Convolution, "positions", "mixed.conv"),
    "norm": (Norm, "rows", "mixed.norm"),
}


def train(folder, kind, axis):
    """Record one step of a model, its batch divided along an axis over ranks or micro-batches."""
    torch.manual_seed(0)
    model = Tokens(FAULTS[kind][0]()).double()
    ids = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(1))
    inputs, labels = ids[:, :-1], ids[:, 1:]
    shares = 2 if axis else 1
    rank, ranks = get_rank(), get_world_size()
    dim = {"rows": 0, "positions": 1}.get(axis, 0)
    length = inputs.shape[dim]
    pieces = [range(length * i // shares, length * (i + 1) // shares) for i in range(shares)]
    own = pieces if ranks == 1 else [pieces[rank]]
    describe = {axis: (own, length)} if axis else None
    with record(folder, model, describe=describe) as tape:
        total = torch.zeros((), dtype=torch.float64)
        for piece in own:
            at = torch.tensor(piece)
            logits = model(inputs.index_select(dim, at))
            chosen = labels.index_select(dim, at)
            loss = F.cross_entropy(logits.flatten(0, 1), chosen.flatten(), reduction="sum")
            loss = loss / labels.numel()
            loss.backward()
            total += loss.detach()
        all_reduce(total)
        tape.put("loss", total)
        for parameter in model.parameters():
            all_reduce(parameter.grad)


def train_each(folder):
    for kind, (_, axis, _) in FAULTS.items():
        if axis == "positions":
            train(f"{folder}/{kind}", kind, axis)


def test_silent_faults_of_plain_modules_are_located(tmp_path):
    for kind in FAULTS:
        train(tmp_path / "one" / kind, kind, None)
    run_ranks(train_each, 2, str(tmp_path / "two"))
    train(tmp_path / "two" / "norm", "norm", "rows")  # over micro-batches
    for kind, (_, _, module) in FAULTS.items():
        report = compare(tmp_path / "one" / kind, tmp_path / "two" / kind)
        birth = report.found[0].birth
        assert (birth.direction, birth.modules) == ("forward", [module]), (kind, str(report))
    assert "positions" in str(compare(tmp_path / "one/positions", tmp_path / "two/positions"))


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


def test_recording_leaves_nothing_behind(tmp_path):
    call, clip = nn.Module.__call__, torch.nn.utils.clip_grad_norm_
    model = step(tmp_path / "one")
    assert nn.Module.__call__ is call
    assert torch.nn.utils.clip_grad_norm_ is clip
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(OSError, match="disk on fire"):
        step(tmp_path / "failed", fails=True)
    assert nn.Module.__call__ is call
    step(tmp_path / "two")
    report = compare(tmp_path / "one", tmp_path / "two")
    assert report.sound
    kinds = {key.kind for key in report.judged}
    results = {"start", "loss", "gradient", "norm", "weight"}
    assert kinds == {"forward", "backward", *results}


def test_a_disk_that_is_full_is_told(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Writer, "add", full)
        with pytest.raises(OSError, match="No space left"):
            step(tmp_path / "full")
    with pytest.raises(InvalidArgumentError, match=r"the step that was recorded|is torn"):
        compare(tmp_path / "full", tmp_path / "full")


def test_what_cannot_be_compared_is_told(tmp_path):
    step(tmp_path / "one")
    with pytest.raises(InvalidArgumentError, match=r"none has no recording"):
        compare(tmp_path / "one", tmp_path / "none")
    with pytest.raises(OSError, match="disk on fire"):
        step(tmp_path / "failed", fails=True)
    with pytest.raises(InvalidArgumentError, match="that was recorded failed: OSError: disk on"):
        compare(tmp_path / "one", tmp_path / "failed")
    step(tmp_path / "unlike", sizes=(8, 12))
    with pytest.raises(InvalidArgumentError, match="different models"):
        compare(tmp_path / "one", tmp_path / "unlike")
    step(tmp_path / "other", seed=1)
    assert compare(tmp_path / "one", tmp_path / "other").found[0].birth.direction == "data"
    step(tmp_path / "torn")
    (data,) = (tmp_path / "torn").glob("*.bin")
    data.write_bytes(data.read_bytes()[:-64])
    with pytest.raises(InvalidArgumentError, match=r"is torn: it has \d+ bytes, and \d+ were"):
        compare(tmp_path / "one", tmp_path / "torn")
    (index,) = (tmp_path / "torn").glob("*.json")
    content = index.read_text()
    index.write_text(content.replace('"world_size": 1', '"world_size": 2'))
    step(tmp_path / "whole")
    whole = next((tmp_path / "whole").glob("*.json"))
    whole.write_text(whole.read_text().replace('"world_size": 1', '"world_size": 2'))
    with pytest.raises(InvalidArgumentError, match=r"ranks \[1\] are missing"):
        compare(tmp_path / "one", tmp_path / "whole")
    first = tmp_path / "one" / "step0.rank0.json"
    other = tmp_path / "whole" / "step0.rank1.json"
    other.with_suffix(".bin").write_bytes(first.with_suffix(".bin").read_bytes())
    other.write_text(first.read_text().replace('"rank": 0', '"rank": 1'))
    with pytest.raises(
        InvalidArgumentError, match=r"two runs: those of ranks \[1\] are of another"
    ):
        compare(tmp_path / "one", tmp_path / "whole")
    index.write_text(content[: len(content) // 2])
    with pytest.raises(InvalidArgumentError, match="is no index of a recording"):
        compare(tmp_path / "one", tmp_path / "torn")
    index.unlink()
    with pytest.raises(InvalidArgumentError, match="ended before its recording did"):
        compare(tmp_path / "one", tmp_path / "torn")
    with (
        pytest.raises(InvalidArgumentError, match="takes a tensor, not a NoneType"),
        record(tmp_path / "no") as tape,
    ):
        tape.put("loss", None)
    with (
        pytest.raises(InvalidArgumentError, match=r"not a list; of a pipeline's stage pass the"),
        record(tmp_path / "no", [nn.Linear(2, 2)]),
    ):
        pass
    for said in ({"rows": 3}, {"rows": ([], 4)}, {"rows": (range(2), "x")}):
        with (
            pytest.raises(InvalidArgumentError, match=r'describe\["rows"\] must be'),
            record(tmp_path / "no", describe=said),
        ):
            pass


def test_a_command_says_where(tmp_path, capsys):
    options = ["--layout", "2x1x1x1", "--steps", "1", "--model", "small_models:UnlikeOnRanks"]
    keep = ["--keep", str(tmp_path / "bad")]
    assert main(["run", *options, *keep, "--out", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("1. output of the model, step 0: off by ")
    assert "born in forward: the model itself" in text
    assert "rank 1 has 1.000001 times the right values" in text
    assert f"again: python -m scaletorch.bisect run {' '.join(options)}" in text
    stages = ["--layout", "1x2x1x1", "--steps", "1", "--model", "small_models:small_model"]
    assert main(["run", *stages, "--keep", str(tmp_path / "good")]) == 0
    folders = [str(tmp_path / name / "layout") for name in ("good", "bad")]
    capsys.readouterr()
    assert main(["compare", *folders]) == 1  # two layouts, of which neither is one process
    other = capsys.readouterr().out
    assert other.splitlines()[1:4] == text.splitlines()[1:4]
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["found"][0]["parts"] == [{"rank": 1, "micro_batch": n} for n in (0, 1)]
    assert main(["compare", str(tmp_path / "no"), str(tmp_path)]) == 2
    assert "has no recording" in capsys.readouterr().err
