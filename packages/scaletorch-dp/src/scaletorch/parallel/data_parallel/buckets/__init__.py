"""Buffers of gradients, and the hooks that reduce them as backward fills them.

Three state machines work together: of a parameter, of a bucket and of a backward.

A **slot** (`bucket.py`) is one parameter's gradient on this rank. `parameter.grad` is either the
synchronised sum, the same on every rank, or this rank's own since the last synchronisation:

                     before_accumulation            after_accumulation
    synchronised --------------------------> held --------------------> own (local)
    grad: the sum    the sum is held back,          grad: a view of     |    ^  more backward calls
    or None          autograd starts anew           the bucket          |    |  add to the view
         ^                                                              | take: the bucket leaves
         |  give: grad = held + reduced                                 v
         +--------------------------------------------------------- in flight
                                                                    grad: None, the sum still held

    A gradient that comes while the slot is in flight (a reentrant checkpoint uses a parameter
    again) makes it `local` once more: its flag is LATE, and all ranks refuse the backward.
    `open`, at the start of a backward, follows the user's changes: grad None or all zero
    applies to the held sum too. `clear` forgets everything. In a sharded bucket `set_placeholder`
    sets a tensor in place of the sum, which lies in shards.

A **bucket** (`bucket.py`) is slots whose gradients travel together in one flat buffer:

    filling --- all slots ready ---> ready --- launch ---> launched --- finish ---> filling
    _missing: those to come          all buckets           _work: the reduction     _spare: the
    _buffer: this rank's own         before it left        _sent: its buffer        buffer, again

    Buckets that are not ready when backward ends leave then, with zeros for slots without a
    gradient; each slot has a flag (`flags`), and the maximum flag of all ranks counts.

A **backward** is followed by `GradientSync` (`hooks.py`), one for each wrapper:

    idle --- first hook of all: _enter ---> running --- its root backward ends: _leave ---> idle
             manager.open; one callback     hooks mark slots ready,          finish if it is
             queued at the engine           buckets leave in one order       synchronised, or close

    `_root` is the engine's number of the outermost backward; backward calls inside it (reentrant
    checkpoints) do not end it. `_touched` is set once a parameter gets a gradient. A `_root`
    still set at the next forward belongs to a backward that raised: its gradients are dropped.
"""
