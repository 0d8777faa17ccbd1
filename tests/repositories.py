"""Repositories of git that tests make."""

import subprocess

AUTHOR = ["-c", "user.name=a", "-c", "user.email=a@example.org"]


def git(folder, *words):
    """Run git in a folder; return what it prints."""
    command = ["git", *AUTHOR, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def commit(folder):
    """Commit all that is there, in a repository that is made if there is none."""
    if not (folder / ".git").exists():
        git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "change")
