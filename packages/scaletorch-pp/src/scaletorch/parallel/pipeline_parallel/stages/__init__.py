"""A rank's stages: a plain model cut, in place, and its own forward run on what is left.

The model's forward is never written anew. It runs on every stage, and these techniques, each in one
file, make it compute that stage alone:

- `cut`: modules of other stages are replaced in their parents by `PassThrough`. If a rank has
  several stages, `Chunks` exchanges them in the same way.
- `stage`: forward is called with what one process gives it, ids and all.
- `passage`: the last module of the stage before returns, in this forward, what that stage has
  passed on. So the model's own code from there to the stage's last module runs here, on what it
  has in one process, and nowhere else. What the call of that last module returns is passed on, and
  the model's code gets a copy; what else of this stage's layers the model returns is refused.
- `extras`: what modules of later stages are given beside hidden states travels with these. The
  first forward of a kind runs uncompiled, finds what has to travel, and has its failures explained.
- `stand_ins`: all other modules of other stages return stand-ins, tensors of a class of their own
  with a form and without values; what is computed from them is one too. What else a model's code
  asks of modules of other stages is answered by twins, modules of their classes whose tensors are
  stand-ins.
- `calls`: a stage's modules get a subclass of their class, whose calls are surrounded: all hooks,
  compiled code and a class's own `__call__` are inside. What surrounds them lets no stand-in in.
- `weights`: with a schedule that splits backwards, each `nn.Linear` with torch's own forward gets a
  `forward` of its own that can leave the weight's gradient for later.
- `materialize`: `meta_parameters` replaces `nn.Module.register_parameter` while a model is built.
"""
