"""Run the programs of documents as fresh interpreters would, but from one that has torch loaded.

A fresh interpreter takes seconds to import torch, and one more for the ranks that it launches. So
each program is a fork of the fork-server that `scaletorch.dist` has for ranks, and the server that
it launches its own ranks from is a fork as well.
"""

from __future__ import annotations

import importlib
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from tools.mutation import warm_ranks

from scaletorch.dist.ranks.locate import MAIN_ALIAS
from scaletorch.dist.ranks.pool import RankPool
from scaletorch.dist.ranks.process import get_server

TIMEOUT = 100.0  # s
PLUGIN = "scaletorch.pytest_ranks.plugin"  # which pytest finds by itself where wheels are installed
PRELOAD = (
    "scaletorch.bisect",
    "scaletorch.checkpoint",
    "scaletorch.compose",
    "scaletorch.guard",
    "scaletorch.models",
    "scaletorch.verify",
)
TRANSFORMERS = (  # takes seconds, in each rank that does not have it
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
)
_SHELL = set("|&;<>()$`*?[]{}~=")


def run(language: str, code: str, folder: Path) -> str:
    """Run a block in a folder; return what it prints on stdout."""
    if "from transformers" in code:
        get_server().preload(TRANSFORMERS)
    if language == "python":
        (folder / "snippet.py").write_text(code, encoding="utf-8")
        return run_python(["snippet.py"], folder)
    commands = [shlex.split(line, comments=True) for line in code.splitlines()]
    commands = [words for words in commands if words]
    if _SHELL & set(code) or not all(map(is_python, commands)):
        return run_bash(code, folder)
    return "".join(run_python(words[1:], folder) for words in commands)


def is_python(words: list[str]) -> bool:
    """Tell whether a command is a module or a file, run by python."""
    return words[0] == "python" and (words[1] == "-m" or words[1].endswith(".py"))


def run_bash(code: str, folder: Path) -> str:
    """Run commands in a shell, with the `python` and `torchrun` of this interpreter."""
    programs = folder / ".bin"
    programs.mkdir()
    for name, words in {"python": "", "torchrun": " -m torch.distributed.run"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{words} "$@"\n')
        (programs / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["bash", "-euo", "pipefail", "-c", code]
    pipes = {"stdout": subprocess.PIPE, "text": True, "timeout": TIMEOUT}
    return subprocess.run(command, cwd=folder, env=environment, check=True, **pipes).stdout


def run_python(arguments: list[str], folder: Path) -> str:
    """Run `python ARGUMENTS` in a folder; return what it prints on stdout."""
    get_server().preload(PRELOAD)
    with RankPool(1, init=False, timeout=TIMEOUT) as pool:
        pool.run(be_interpreter, arguments, str(folder), dict(os.environ))
    return (folder / "stdout").read_text(encoding="utf-8")


def be_interpreter(arguments: list[str], folder: str, environment: dict[str, str]) -> None:
    """Be `python ARGUMENTS`, in a process that was forked for it."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, folder)
    stdout = os.open("stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(stdout, 1)
    warm_ranks.prepare()
    try:
        run_main(arguments)
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"python {shlex.join(arguments)} ended with {end.code!r}") from end


def run_main(arguments: list[str]) -> None:
    """Run a module (`-m NAME`) or a file as `__main__`; one that imports pytest is run by it."""
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments
    path = os.path.abspath(arguments[0])
    text = Path(path).read_text(encoding="utf-8")
    if "import pytest" in text:
        run_pytest(path)
        return
    main = sys.modules["__main__"] = sys.modules[MAIN_ALIAS] = ModuleType("__main__")
    main.__file__ = path
    exec(compile(text, path, "exec"), vars(main))
    if "__name__ ==" not in text:
        run_tests(main)


def run_pytest(path: str) -> None:
    """Run a file by pytest; raise what it says if it does not pass."""
    code = importlib.import_module("pytest").main(["-q", "-p", PLUGIN, path])
    if code:
        sys.stdout.flush()
        raise RuntimeError(Path("stdout").read_text(encoding="utf-8"))


def run_tests(module: ModuleType) -> None:
    """Run the tests that a program defines, as pytest would."""
    for name, value in list(vars(module).items()):
        if name.startswith("test_"):
            value()
