"""A plugin of pytest: tests that run on real ranks of this machine, in any project.

pytest finds it where `scaletorch-dist` is installed. It has

- the marker `ranks`: `@pytest.mark.ranks(2)` runs the body of a test on 2 ranks of a gloo group,
  `@pytest.mark.ranks(2, 4, timeout=30)` on 2 and on 4, each a test of its own,
- the fixture `ranks`: `ranks.run(function, 4)` returns what each of 4 ranks returned,
- the fixture `assert_trains_alike`, which is `scaletorch.verify`'s, from the package `scaletorch`.

It lies beside `scaletorch.dist`, which imports torch: pytest must not wait for that at its start.
Nothing of it is imported before the first test on ranks runs.
"""

from .fixture import Ranks

__all__ = ["Ranks"]
