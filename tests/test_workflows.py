"""The workflows name programs, suites and jobs that there are."""

import re
import tomllib

import pytest
import yaml
from tools.packages import PACKAGES, ROOT, pyproject
from tools.testing.changed import SUITES

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {file.stem: yaml.safe_load(file.read_text()) for file in FOLDER.glob("*.yml")}
HATCH = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["envs"]


def jobs(name):
    return WORKFLOWS[name]["jobs"]


def commands(job):
    return [step["run"] for step in job.get("steps", []) if "run" in step]


def test_the_matrix_is_every_suite_on_every_supported_python():
    matrix = jobs("ci")["test"]["strategy"]["matrix"]
    assert matrix["suite"] == "${{ fromJSON(needs.changed.outputs.suites) }}"
    assert [*PACKAGES, "tests"] == SUITES
    prefix = "Programming Language :: Python :: "
    for package in PACKAGES:
        classifiers = pyproject(package)["project"]["classifiers"]
        supported = [c.removeprefix(prefix) for c in classifiers if c.startswith(prefix)]
        assert matrix["python"] == supported


@pytest.mark.parametrize("name", WORKFLOWS)
def test_jobs_name_packages_and_scripts_that_there_are(name):
    assert {*re.findall(r"scaletorch-[a-z]+", (FOLDER / f"{name}.yml").read_text())} <= {*PACKAGES}
    for job in jobs(name).values():
        for line in "\n".join(commands(job)).splitlines():
            if line.startswith("hatch run"):
                for script in named_scripts(line):
                    environment, _, inside = script.rpartition(":")
                    assert inside in HATCH[environment or "default"]["scripts"], line
            if line.startswith("for launcher in"):
                assert {*line.split(";")[0].split()[3:]} <= {*HATCH}


def named_scripts(line):
    """The script of `hatch run`, or both of a choice."""
    chosen = re.search(r"\$\{\{.*&& '(\w+)' \|\| '(\w+)' \}\}", line)
    return {*chosen.groups()} if chosen else {line.split()[2]}


def test_everything_is_tested_before_anything_is_published():
    release = jobs("release")
    assert release["ci"]["uses"] == "./.github/workflows/ci.yml"
    assert release["build"]["needs"] == "ci"
    assert release["publish"]["needs"] == "build"
    assert release["publish"]["permissions"] == {"id-token": "write"}
    assert {*jobs("ci")["all"]["needs"]} == {*jobs("ci")} - {"all"}
