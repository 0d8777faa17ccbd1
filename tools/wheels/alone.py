"""Checks of one built wheel in an environment with it, its requirements, and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path

from ..environments import pip, run
from ..packages import closure, modules
from ..rows import CheckError
from .metadata import metadata

SNIPPET = re.compile(r"^```python\n(.*?)^```(?:\n\n```output\n(.*?)^```)?", re.S | re.M)

NAME = re.compile(r"# (\w+\.py)\n")  # file name, under which other snippets import it

RUNNER = Path(__file__).with_name("snippets.py")
PROGRAM = "snippet.py"

# All modules, since any may have a foreign import; but a __main__ is a command, a plugin is for
# another program, and dist.guard is another wheel's name: these may need an extra.
IMPORT_ALL = """
import importlib, pkgutil, sys
names = []
for portion in sys.argv[1:]:
    package = importlib.import_module(portion)
    found = pkgutil.walk_packages(package.__path__, portion + ".")
    apart = ("__main__", ".plugin", ".dist.guard")
    names += [portion, *(each.name for each in found if not each.name.endswith(apart))]
files = [importlib.import_module(name).__file__ for name in names]
outside = [file for file in files if not file.startswith(sys.prefix)]
assert not outside, f"not from the wheels: {outside}"
print(len(files))
"""


@dataclass(frozen=True)
class Alone:
    """A wheel, the folder of wheels that pip may use, and an environment for it."""

    package: str
    wheel: Path
    wheels: Path
    python: Path

    def install(self) -> str:
        """Install the wheel with its requirements: torch, which is there, and our own wheels."""
        report = self.python.parent / "report.json"
        source = ["--no-index", "--find-links", str(self.wheels)]
        done = pip(self.python, "install", *source, "--report", report, self.package)
        if done.returncode:
            raise CheckError(f"pip cannot install it beside torch:\n{done.stdout}{done.stderr}")
        brought = sorted(e["metadata"]["name"] for e in json.loads(report.read_text())["install"])
        if brought != closure(self.package):
            raise CheckError(f"pip brings {brought}, not {closure(self.package)}")
        checked = pip(self.python, "check")
        if checked.returncode:
            raise CheckError(f"pip check:\n{checked.stdout}")
        return (
            f"beside torch brings {', '.join(n for n in brought if n != self.package) or 'nothing'}"
        )

    def imports(self) -> str:
        """Import every module; nothing may be printed."""
        done = run(self.python, "-c", IMPORT_ALL, *modules(self.package), folder=self.wheels)
        if done.returncode or not done.stdout.strip().isdigit():
            raise CheckError(f"an import fails, or prints:\n{done.stdout}{done.stderr}")
        return f"{done.stdout.strip()} modules, where torch and what it requires is all there is"

    def readme(self) -> str:
        """Run every Python snippet of the wheel's README."""
        snippets = SNIPPET.findall(metadata(self.wheel).description or "")
        if not snippets:
            raise CheckError("the README has no Python snippet")
        files = {match[1]: code for code, _ in snippets if (match := NAME.match(code))}
        folders = [self.python.parent.parent / f"snippet{n}" for n in range(1, len(snippets) + 1)]
        for folder, (code, _) in zip(folders, snippets, strict=True):
            folder.mkdir()
            for name, text in {**files, PROGRAM: code}.items():
                (folder / name).write_text(text)
        done = run(self.python, RUNNER, *folders, folder=self.wheels)
        ran = [folder for folder in folders if (folder / "stdout").exists()]
        wrong = {ran[-1]} if ran and done.returncode else set()
        for folder, (_, output) in zip(ran, snippets, strict=False):
            printed = (folder / "stdout").read_text()
            if folder in wrong or (output and printed != output):
                told = printed + (folder / "stderr").read_text()
                raise CheckError(f"{folder.name} fails:\n{told}")
        if done.returncode:
            raise CheckError(f"no snippet ran:\n{done.stderr}")
        return f"{len(snippets)} snippets run"

    def extras(self) -> str:
        """Resolve all extras together with the installed torch, without installing or building."""
        names = metadata(self.wheel).provides_extra or []
        if not names:
            return "none"
        wanted = [f"{self.wheel}[{','.join(names)}]", f"torch=={installed_version('torch')}"]
        options = ["--dry-run", "--only-binary", ":all:", "--find-links", str(self.wheels)]
        done = pip(self.python, "install", *options, *wanted)
        if done.returncode:
            raise CheckError(f"{wanted[0]} does not resolve:\n{done.stdout}{done.stderr}")
        brings = "".join(re.findall(r"^Would install (.*)$", done.stdout, re.M)).split()
        return f"{', '.join(names)}: {len(brings)} libraries, and torch stays"
