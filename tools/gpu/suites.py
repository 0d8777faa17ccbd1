"""The repository's tests and proofs, on this device."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

from scaletorch.compose.naming import parse_layout
from scaletorch.verify import default_batch, default_model, verify
from scaletorch.verify.problem import default_mixture
from scaletorch.verify.report import CaseResult

from ..packages import ROOT
from .checks import Checks, Found, Skip
from .ranks import on_ranks

DIST = "packages/scaletorch-dist/tests"
TESTS = {  # file -> libraries that it needs besides pytest
    f"{DIST}/test_collectives_gpu.py": ("hypothesis",),
    "packages/scaletorch-cp/tests/test_cp_kernels.py": ("hypothesis",),
}


def marked(checks: Checks) -> None:
    """Run the tests marked `gpu`."""
    with TemporaryDirectory() as folder:
        # The settings of pyproject.toml need plugins, so leave them out.
        plain = ["-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib"]
        plain += ["-o", "faulthandler_timeout=20"]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", f"--junitxml={folder}/xml"]
        files = [file for file, needs in TESTS.items() if all(map(find_spec, needs))]
        subprocess.run([*command, *plain, *files], cwd=ROOT, check=False, timeout=checks.left())
        for case in ElementTree.parse(f"{folder}/xml").iter("testcase"):
            checks.run(case.get("name", ""), _told, case)


def _told(case: ElementTree.Element) -> Found:
    for each in case:
        if each.tag == "skipped":
            raise Skip(each.get("message", ""))
        if each.tag in ("failure", "error"):
            raise AssertionError(f"{each.get('message', '')}\n{each.text}")
    return Found(note=f"{case.get('time')} s")


def bodies(checks: Checks) -> None:
    """Run the bodies that two ranks must be able to run on every backend, one after another."""
    sys.path.insert(0, str(ROOT / DIST))
    every_backend = importlib.import_module("every_backend")
    calls = [(file, *call) for file, some in every_backend.BODIES.items() for call in some]
    calls += [("", "train_with_ddp"), ("", "use_device_mesh"), ("", "train_with_dtensors")]
    for file, name, *args in calls[: 3 if checks.quick else None]:
        checks.run(f"{name}{tuple(args) or ''}", _body, checks, file, name, args)


def _body(checks: Checks, *call: Any) -> Found:
    on_ranks(checks, body, 2, *call, timeout=30.0)
    return Found()


def body(device: str, file: str, name: str, args: Sequence[Any]) -> None:
    """Run one body on this rank."""
    every_backend = importlib.import_module("every_backend")
    if not file:
        getattr(every_backend, name)(device)
        return
    fn = getattr(every_backend.load(file), name)
    with every_backend.OnDevice(device):
        getattr(fn, "__rank_body__", fn)(*args)


class _Over(Exception):
    """The group's time is over."""


def proof(
    checks: Checks,
    ranks: int | Sequence[str],
    dtypes: Sequence[str],
    options: Mapping[str, Sequence[str | int]],
    ep: Sequence[int] | None,
) -> None:
    """Compare layouts with one process on this device, case after case until the time is over."""

    def progress(result: CaseResult) -> None:
        checks.run(str(result.case), _case, result)
        if checks.left() < 2 * result.seconds:
            raise _Over(result.case)

    backend = "gloo" if checks.device == "cpu" else "nccl"
    where: dict[str, Any] = {"device": checks.device, "backend": backend}
    if isinstance(ranks, int):
        where["world_size"] = ranks
    else:
        where["layouts"] = [parse_layout(each) for each in ranks[: 1 if checks.quick else None]]
    try:
        verify(
            default_mixture if ep else default_model, default_batch, ep=ep, options=options,
            dtype=dtypes[:1] if checks.quick else dtypes, timeout=20.0 * checks.slack,
            progress=progress, **where,
        )  # fmt: skip
    except _Over as last:
        checks.run("the rest", _rest, last)


def _rest(last: _Over) -> Found:
    raise Skip(f"the time was over after {last}")


def _case(result: CaseResult) -> Found:
    if result.refused or result.unjudged:
        raise Skip(result.refused or result.unjudged)
    if result.failed:
        kind = TimeoutError if "had not finished after" in result.error else AssertionError
        raise kind(result.explanation("python -m scaletorch.verify"))
    compared = sum(rank.compared for rank in result.ranks)
    error = None if result.worst is None else result.worst.error
    return Found(error, note=f"{compared} compared in {result.seconds:.1f} s")
