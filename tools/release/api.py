"""Record the public names of each package, and compare with the record.

`python -m tools.release.api` reads the sources without importing them, and compares every public
module's names, with signatures, with `packages/NAME/api.txt`, and the names that other wheels
build on with `packages/NAME/building.txt`; `--accept` writes these files.
"""

from __future__ import annotations

import difflib
import itertools
import sys
from collections.abc import Iterable
from pathlib import Path

import griffe

from ..packages import PACKAGES, ROOT

_PARALLEL = "scaletorch.parallel"

# The public modules of each package.
MODULES = {
    "scaletorch": [
        "scaletorch.checkpoint",
        "scaletorch.compose",
        "scaletorch.models",
        "scaletorch.pretrain",
        "scaletorch.bisect",
        "scaletorch.verify",
    ],
    "scaletorch-cp": [
        f"{_PARALLEL}.context_parallel",
        f"{_PARALLEL}.context_parallel.building",
        f"{_PARALLEL}.context_parallel.context_parallel",
        f"{_PARALLEL}.context_parallel.cp_comms",
    ],
    "scaletorch-dist": [
        "scaletorch.dist",
        "scaletorch.dist.building",
        "scaletorch.dist.deferred",
        "scaletorch.dist.dist",
        "scaletorch.dist.devices",
        "scaletorch.dist.errors",
        "scaletorch.dist.functional",
        "scaletorch.dist.siblings",
        "scaletorch.dist.testing",
        "scaletorch.pytest_ranks",
    ],
    "scaletorch-dp": [
        f"{_PARALLEL}.data_parallel",
        f"{_PARALLEL}.data_parallel.building",
        f"{_PARALLEL}.data_parallel.data_parallel",
        f"{_PARALLEL}.data_parallel.bucket",
    ],
    "scaletorch-ep": [
        f"{_PARALLEL}.expert_parallel",
        f"{_PARALLEL}.expert_parallel.building",
        f"{_PARALLEL}.expert_parallel.expert_parallel",
    ],
    "scaletorch-guard": ["scaletorch.guard"],
    "scaletorch-pg": [
        f"{_PARALLEL}.pg_manager",
        f"{_PARALLEL}.pg_manager.building",
        f"{_PARALLEL}.placement",
    ],
    "scaletorch-pp": [
        f"{_PARALLEL}.pipeline_parallel",
        f"{_PARALLEL}.pipeline_parallel.building",
        f"{_PARALLEL}.pipeline_parallel.drawing",
        f"{_PARALLEL}.pipeline_parallel.pipeline_parallel",
        f"{_PARALLEL}.pipeline_parallel.pp_comms",
        f"{_PARALLEL}.pipeline_parallel.schedules",
    ],
    "scaletorch-tp": [
        f"{_PARALLEL}.tensor_parallel",
        f"{_PARALLEL}.tensor_parallel.building",
        f"{_PARALLEL}.tensor_parallel.tensor_parallel",
        f"{_PARALLEL}.tensor_parallel.tp_comms",
    ],
}

# File of a record -> its first lines.
HEADS = {
    "api.txt": """\
# Public names of {package}. A change here is a change for its users: make it on purpose, tell
# them in packages/{package}/changes, and write this file anew with `hatch run api --accept`.
""",
    "building.txt": """\
# Names of {package} for wheels that build on it, not for users. A patch release keeps them; write
# this file anew with `hatch run api --accept`.
""",
}


def record(package: str, file: str) -> str:
    """Return the text of one record of a package: its modules with their names, or "" without any.

    Args:
        package: The package.
        file: "api.txt", for users; or "building.txt", for other wheels.
    """
    modules = [each for each in MODULES[package] if for_wheels(each) is (file == "building.txt")]
    if not modules:
        return ""
    sources = ROOT / "packages" / package / "src"
    loader = griffe.GriffeLoader(search_paths=[sources], allow_inspection=False)
    loaded = loader.modules_collection
    loader.load("scaletorch")
    named: dict[str, str] = {}  # path of the definition → its first public name
    lines = HEADS[file].format(package=package).splitlines()
    for module in modules:
        lines += ["", module]
        for name in sorted(public_names(loaded[module])):
            path = f"{module}.{name}"
            lines += indented(one_name(path, find(loaded, path), named))
    return "\n".join(lines) + "\n"


def for_wheels(module: str) -> bool:
    """Return whether a module's names are for other wheels, not for users."""
    return module.rpartition(".")[2] in ("building", "deferred", "siblings")


def public_names(module: griffe.Object | griffe.Alias) -> list[str]:
    """Return `__all__`, or all names without underscore that the module defines.

    A module without either exports what it imports.
    """
    module = tabled(module)
    if module.exports is not None:
        return [str(name) for name in module.exports]
    own = {name for name, member in module.members.items() if not member.is_alias}
    return [name for name in own or module.imports if not name.startswith("_")]


def tabled(module: griffe.Object | griffe.Alias) -> griffe.Object | griffe.Alias:
    """Return the module that imports a module's names: itself, or the submodule `public`.

    Packages whose names are imported on first access have such a submodule.
    """
    public = module.members.get("public")
    return module if public is None or not public.is_module else public


def find(modules: griffe.ModulesCollection, path: str) -> griffe.Object | str:
    """Return the definition of a path, or the path itself if it belongs to another package.

    A module's imports are followed by hand, since a path may also be that of a submodule.
    """
    parent, _, name = path.rpartition(".")
    try:
        home = tabled(modules[parent])
        if name in home.imports:
            return find(modules, home.imports[name])
        found: griffe.Object = modules[path]
        return found
    except KeyError:
        return path


def one_name(path: str, found: griffe.Object | str, named: dict[str, str]) -> list[str]:
    """Return the lines of a public name; a second name for the same object refers to the first."""
    if isinstance(found, str):
        return [f"{path.rpartition('.')[2]} = {found}"]
    first = named.setdefault(found.path, path)
    return described(found) if first == path else [f"{found.name} = {first}"]


def described(defined: griffe.Object) -> list[str]:
    """Return a function's signatures, a class with its members, or a name with its type."""
    if isinstance(defined, griffe.Function):
        return [each.signature() for each in defined.overloads or [defined]]
    if isinstance(defined, griffe.Class):
        bases = ", ".join(map(str, defined.bases))
        lines = [f"class {defined.name}({bases})" if bases else f"class {defined.name}"]
        return lines + indented(line for member in members(defined) for line in described(member))
    if isinstance(defined, griffe.Attribute):
        kind = "" if defined.annotation is None else f": {defined.annotation}"
        constant = not kind and defined.parent is not None and defined.parent.is_module
        value = f" = {defined.value}" if constant and not defined.name.startswith("_") else ""
        return [f"{defined.name}{kind}{value}"]
    return [defined.name]


def members(defined: griffe.Class) -> list[griffe.Object]:
    """Return the public members of a class, including those of bases without a public name."""
    private = [base for base in defined.mro() if base.name.startswith("_")]
    found = {k: v for each in [*reversed(private), defined] for k, v in each.members.items()}
    public = [name for name in sorted(found) if name == "__init__" or not name.startswith("_")]
    return [member for name in public if isinstance(member := found[name], griffe.Object)]


def indented(lines: Iterable[str]) -> list[str]:
    """Return lines one level deeper."""
    return [f"    {line}" for line in lines]


def difference(package: str) -> str:
    """Return a diff of the package's names from its records; empty if they are equal."""
    lines: list[str] = []
    for name in HEADS:
        file = record_file(package, name)
        old = file.read_text() if file.exists() else ""
        names = (f"{file.relative_to(ROOT)}, the record", "the sources")
        new = record(package, name)
        lines += difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm="")
    return "\n".join(lines)


def record_file(package: str, name: str) -> Path:
    """Return a file that holds a record of a package."""
    return ROOT / "packages" / package / name


def main(arguments: list[str]) -> int:
    """Write or compare all records; return 1 if one differs."""
    if arguments == ["--accept"]:
        for package, name in itertools.product(PACKAGES, HEADS):
            if text := record(package, name):
                record_file(package, name).write_text(text)
        return 0
    differences = [text for package in PACKAGES if (text := difference(package))]
    print(*differences, sep="\n\n")
    if differences:
        print("\nIf that is meant: hatch run api --accept", file=sys.stderr)
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
