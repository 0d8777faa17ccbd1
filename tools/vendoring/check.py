"""Show that vendoring from this clone does what docs/vendoring.md says.

Three projects in a temporary folder get copies, and a newer clone is played by a changed copy of
this one; then two ranks train with the copies beside the installed library.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from ..packages import PACKAGES, ROOT

ASKED = {"acme": "scaletorch", "zenith": "scaletorch", "lone": "tp"}
GONE = "dist/bench.py"
COME = "parallel/tensor_parallel/come.py"
TP = Path("packages/scaletorch-tp/src/scaletorch/parallel/tensor_parallel")
Row = tuple[str, str, bool]


def check() -> list[Row]:
    """Vendor, damage, check, update and train.

    Returns:
        What was tried, what came of it, and whether that is right.
    """
    with tempfile.TemporaryDirectory(prefix="scaletorch-vendored-") as scratch:
        hosts = Path(scratch, "hosts")
        newer = newer_clone(Path(scratch, "newer"))
        rows = [_copy(hosts), _damage(hosts), _update(hosts, newer)]
        return rows + (_train(hosts) if all(ok for *_, ok in rows) else [])


def newer_clone(folder: Path) -> Path:
    """Copy of this clone what is vendored, with a newer tp, a file more and one less."""
    for part in ("LICENSE", "tools", *(f"packages/{name}/src" for name in PACKAGES)):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / part, folder / part)
    for name in PACKAGES:
        shutil.copy(ROOT / "packages" / name / "pyproject.toml", folder / "packages" / name)
    version = folder / TP / "_version.py"
    version.write_text(re.sub(r'(__version__ = "\d+\.\d+)\.\d+', r"\1.99", version.read_text()))
    (folder / TP / "come.py").write_text('"""New."""\n')
    (folder / "packages/scaletorch-dist/src/scaletorch" / GONE).unlink()
    return folder


def vendor(clone: Path, host: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a clone's tool for a project."""
    command = [sys.executable, "-m", "tools.vendoring", "--into", str(host / "_vendor")]
    return subprocess.run(
        [*command, *words], cwd=clone, capture_output=True, text=True, check=False
    )


def _copy(hosts: Path) -> Row:
    counts = []
    for name, packages in ASKED.items():
        (hosts / name).mkdir(parents=True)
        vendor(ROOT, hosts / name, "--packages", packages)
        manifest = json.loads((_folder(hosts, name) / "VENDORED.json").read_text())
        counts.append(f"{len(manifest['files'])} in {name}")
    sound = all(vendor(ROOT, hosts / name, "--check").returncode == 0 for name in ASKED)
    return "copies, each with a manifest that fits", "files: " + ", ".join(counts), sound


def _damage(hosts: Path) -> Row:
    """Edit, remove and add a file: both --check and --update name what is not as copied."""
    folder, host = _folder(hosts, "acme"), hosts / "acme"
    (folder / "dist/errors.py").write_text("edited = True\n")
    (folder / "dist/members.py").unlink()
    (folder / "own.py").touch()
    found = vendor(ROOT, host, "--check")
    refused = vendor(ROOT, host, "--update")
    forced = vendor(ROOT, host, "--update", "--force")
    kept = (folder / "own.py").exists()
    (folder / "own.py").unlink()
    named = "edited: dist/errors.py\nmissing: dist/members.py\nstray: own.py\n" in found.stdout
    refusal = "edited: dist/errors.py\n  missing: dist/members.py\n" in refused.stderr
    codes = (found.returncode, refused.returncode, forced.returncode)
    again = vendor(ROOT, host, "--check").returncode == 0
    right = named and refusal and codes == (1, 1, 0) and kept and again
    return "damage is named, an update refuses it", "edited, missing and stray files", right


def _update(hosts: Path, newer: Path) -> Row:
    """Bring one copy to the newer clone; another stays, so that versions apart work together."""
    folder, host = _folder(hosts, "zenith"), hosts / "zenith"
    told = vendor(newer, host, "--check").stdout
    done = vendor(newer, host, "--update")
    right = (
        re.search(r"scaletorch-tp \S+\.99 in this clone is newer than", told) is not None
        and done.returncode == 0
        and (folder / COME).exists()
        and not (folder / GONE).exists()
        and vendor(newer, host, "--check").returncode == 0
    )
    return "an update follows a newer clone", "a file came, one went", right


def _train(hosts: Path) -> list[Row]:
    """Run the ranks, in these projects' folder, with the installed library or else this clone's."""
    path = [str(hosts), *filter(None, [os.environ.get("PYTHONPATH")])]
    if find_spec("scaletorch") is None:
        path += [str(ROOT / "packages" / name / "src") for name in PACKAGES]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "vendoring" / "ranks.py")],
        cwd=hosts,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return [(what, detail, ok) for what, detail, ok in json.loads(done.stdout)]
    except ValueError:
        return [("two ranks with three copies", done.stderr[-2000:], False)]


def _folder(hosts: Path, name: str) -> Path:
    return hosts / name / "_vendor" / "scaletorch"


def main() -> int:
    """Print the table; 1 where something is not so."""
    rows = check()
    width = max(len(what) for what, _, _ in rows)
    for what, detail, ok in rows:
        print(f"{'ok' if ok else 'NO':2}  {what:{width}}  {detail}")
    return int(not all(ok for *_, ok in rows))


if __name__ == "__main__":
    sys.exit(main())
