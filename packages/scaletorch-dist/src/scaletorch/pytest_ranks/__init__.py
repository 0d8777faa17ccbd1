"""A pytest plugin that runs tests on real ranks of this machine, in any project.

pytest finds it if `scaletorch-dist` is installed. It has

- the marker `ranks`: `@pytest.mark.ranks(2)` runs the body of a test on 2 ranks of a gloo group,
  `@pytest.mark.ranks(2, 4, timeout=30)` on 2 and on 4, as two tests,
- the fixture `ranks`: `ranks.run(function, 4)` returns the return values of 4 ranks,
- the fixture `assert_trains_alike` of `scaletorch.verify`, from the package `scaletorch`.

It is separate from `scaletorch.dist`, which imports torch and would delay the start of pytest; that
package is imported only when the first test on ranks runs.
"""

from .fixture import Ranks

__all__ = ["Ranks"]
