"""A rank's stages: a plain model cut in place, whose own forward runs on each of them.

The model's forward is never written anew. Every stage runs all of it, on what one process gives it,
ids and all (`stage`), and computes its own part:

1. `cut`: modules of other stages are replaced in their parents by `PassThrough`. If a rank has
   several stages, `Chunks` exchanges them in the same way.
2. `stand_ins`: these return stand-ins, tensors of a class of their own with a form and without
   values; what is computed from them is one too. What else a model's code asks of modules of other
   stages is answered by twins, modules of their classes whose tensors are stand-ins.
3. `passage`: the last module of the stage before returns, in this forward, what that stage has
   passed on. From there the model's own code runs on what it has in one process, up to the stage's
   last module. What the call of that returns is passed on, and the code behind it gets a copy. What
   else of this stage's layers the model returns is refused.
4. `calls`: a stage's modules get a subclass of their class, whose calls are surrounded: all hooks,
   compiled code and a class's own `__call__` are inside. What surrounds them lets no stand-in in.
5. `extras`: what modules of later stages are given beside hidden states travels with these. The
   first forward of a kind runs uncompiled and finds what has to travel; its failures are explained.

The rest is no part of the forward: `ties` sums gradients of parameters that several ranks hold,
`weights` leaves gradients of `nn.Linear` for later where a schedule splits backwards, `materialize`
fills a model that was built on meta, and `state` is what a stage keeps between calls.
"""
