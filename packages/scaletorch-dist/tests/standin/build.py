"""Builds the stand-in once for each torch and source, into a cache folder of this user."""

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent
SOURCES = [FOLDER / "device.cpp", FOLDER / "backend.cpp"]
HEADERS = [FOLDER / "stream.h"]
NAME = "scaletorch_standin"


def missing_tool():
    """What this machine lacks to build it, or None."""
    for tools in (("g++", "c++"), ("ninja",)):
        if not any(map(shutil.which, tools)):
            return f"{tools[0]} is not on PATH"
    return None


def cache_folder():
    """Where this source for this torch and Python is built."""
    text = "".join(path.read_text() for path in SOURCES + HEADERS)
    key = f"{torch.__version__} {sys.version} {text}"
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return cache / "scaletorch-tests" / hashlib.blake2b(key.encode(), digest_size=8).hexdigest()


def build():
    """Build it if need be (about a minute), and return the library's path."""
    library = cache_folder() / f"{NAME}.so"
    if not library.exists():
        from torch.utils.cpp_extension import load

        library.parent.mkdir(parents=True, exist_ok=True)
        load(
            NAME,
            [str(path) for path in SOURCES],
            build_directory=str(library.parent),
            extra_cflags=["-O1", "-g0"],
            is_python_module=False,
            is_standalone=False,
        )
    return library


def prepare():
    """Build it for a test, in a process of its own; skip the test where a tool is missing."""
    if (cache_folder() / f"{NAME}.so").exists():
        return
    missing = missing_tool()
    if missing:
        pytest.skip(f"the stand-in device cannot be built: {missing}")
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr


def load_library():
    """Import what `build` built before."""
    spec = importlib.util.spec_from_file_location(NAME, cache_folder() / f"{NAME}.so")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.stdout.write(f"{build()}\n")
