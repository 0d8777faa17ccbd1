"""Every Python snippet of the READMEs and guides runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ["README.md", "packages/*/README.md", "docs/**/*.md"]
DOCUMENTS = [document for pattern in PATTERNS for document in sorted(ROOT.glob(pattern))]
SNIPPETS = [
    pytest.param(code, id=f"{document.relative_to(ROOT)}:{number}")
    for document in DOCUMENTS
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", document.read_text(), re.S), 1)
]


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet_runs(code, tmp_path):
    (tmp_path / "snippet.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "snippet.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
