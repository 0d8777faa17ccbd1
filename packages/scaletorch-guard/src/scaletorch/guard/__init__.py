"""The guard turns a fault of one rank into an error on every rank, within seconds, that names it.

After `start` every rank records its calls, and one monitor, a process on rank 0's host, compares
them. The processes, their threads and the files that they run:

    a rank's process (every rank)                          the monitor's process (one for a job)
    .-----------------------------------------------.      .----------------------------------.
    | threads of the program                        |      | one thread: monitor.py, no torch |
    |   control.py   start, step, tell, watch, stop |      |   lets ranks in, hears them:     |
    |   recorder.py  every call, wait and verdict   |      |               message -> picture |
    |     |   calls.py   its group and line, and    |      |   diagnosis.py  picture          |
    |     |              memory that the host's     |      |     mismatch.py   -> fault, text |
    |     v              ranks share                |      |                                  |
    |   tracks, waits, steps        verdict         | News |                                  |
    |     v                            ^            | ---> |                                  |
    | one thread: watcher.py ----------'            | <--- |                                  |
    |   reads what is new, ends waits in gloo       | Fault|                                  |
    '-----------------------------------------------'      '----------------------------------'

How a call is guarded: `scaletorch.dist` reports it to the recorder. `record` numbers it in its
channel, keeps an entry of it, and compares it with the board; `run` makes the backend's call, and
records a wait while it lasts. Four times a second, and when its waits change, the watcher
sends the process's news: the number of calls in each channel, their checksums, and the waits. The
monitor updates its picture, diagnoses it, asks ranks for their last entries if necessary, and sends
a fault to all ranks. The watcher then sets the verdict and breaks gloo's connections: the program's
threads wake with an error, get its cause from the verdict, and raise `RankFaultError`.

If rank 0's process dies, the monitor lives long enough to report it; if the monitor dies, the guard
is off. start_monitor.py starts it: rank 0 launches the process, and sends its address to the other
ranks through the guarded group.

Terms:

- A *channel* is a sequence of calls that all its members must make in the same way; a *track* is
  one rank's progress in it, and a *mark* a checksum of its calls up to a point.
- A *note* is a call in this process, and an *entry* its record; a rank's *tails* are the last
  entries of its channels; a *wait* is a thread that is inside a call.
- A *report* holds all that the monitor knows of one rank; the *picture*, all reports and channels.
- A diagnosis returns a *fault*, a *need* for more entries, *slowness*, or nothing. The *verdict*
  tells a rank whether the guard has ended, and with which fault.
"""

from ._version import __version__
from .control import start, step, stop, tell, watch

__all__ = ["__version__", "start", "step", "stop", "tell", "watch"]
