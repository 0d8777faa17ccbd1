"""The guard: a fault of one rank becomes an error on every rank, within seconds, that names it.

`start` has every rank write down its calls, and starts one monitor, a process beside rank 0, which
compares them. Which process and which thread runs which file:

    a rank's process (every rank)                          the monitor's process (one for a job)
    .-----------------------------------------------.      .----------------------------------.
    | threads of the program                        |      | one thread: monitor.py, no torch |
    |   control.py   start, step, tell, watch, stop |      |   lets ranks in, hears them      |
    |   recorder.py  every call, wait and verdict   |      |   updates.py    message          |
    |     |   calls.py   its text, checksum, line   |      |                   -> picture     |
    |     |   ledger.py  a file: the last calls, and|      |   diagnosis.py  picture          |
    |     v              memory of the host's ranks |      |     mismatch.py   -> fault, text |
    |   tracks, waits, steps        verdict         | News |                                  |
    |     v                            ^            | ---> |                                  |
    | one thread: watcher.py ----------'            | <--- |                                  |
    |   reads what is new, ends waits in gloo       | Fault|                                  |
    '-----------------------------------------------'      '----------------------------------'

A call: `scaletorch.dist` tells the recorder of it; `record` gives it a number in its channel,
writes an entry into the ledger, and compares it with the board; `run` makes the backend's call, and
keeps a wait while it lasts. Four times a second, and when its waits change, the watcher sends the
news of this process: how many calls it has made in each channel, checksums of them, and its waits.
The monitor writes them into its picture, diagnoses it, asks ranks for their last entries if it
needs them, and sends the fault to all. The watcher sets the verdict and breaks gloo's connections:
the program's threads wake with an error, ask the verdict for its cause, and raise `RankFaultError`.

If rank 0's process dies the monitor outlives it long enough to tell; if the monitor is gone the
guard is off. start_monitor.py has the beginning: rank 0 starts the process, and the address travels
through the group that is guarded.

The words, one meaning each:

- A *channel* is a sequence of calls that its members must all make in the same way; a *track* is
  how far one rank is in it, a *mark* a checksum of its calls up to there.
- A *note* is a call in this process; an *entry* is its line in the *ledger*; a rank's *tails* are
  the last entries of its channels; a *wait* is a thread that is in a call.
- A *report* is all that the monitor knows of one rank; the *picture* is all reports and channels.
- A diagnosis finds a *fault*, or the *need* for more entries, or *slowness*, or nothing. The
  *verdict* is a rank's own knowledge of whether the guard has ended, and with which fault.
"""

from ._version import __version__
from .control import start, step, stop, tell, watch

__all__ = ["__version__", "start", "step", "stop", "tell", "watch"]
