"""A rank's stages: a plain model cut in place, with its own forward run on each stage.

The model's forward is not rewritten. Every stage runs the whole forward with the same arguments as
a single process, `input_ids` included (`stage`), but computes only its own modules:

1. `cut` replaces the modules of other stages by a `PassThrough` in their parents. If a rank has
   several stages, `Chunks` swaps their modules in and out in the same way.
2. `stand_ins`: a `PassThrough` returns stand-ins: tensors with a shape, dtype and device but no
   values. The result of an operation on a stand-in is a stand-in. When the model's code reads an
   attribute of another stage's module, its twin answers: a module of the same class
   whose tensors are stand-ins.
3. `passage`: the last module of the previous stage returns the hidden states received from that
   stage. After that the model's code runs on real values, up to the stage's last module. The output
   of that module is sent to the next stage, with other tensors that modules of later stages take.
   The code after it runs on a copy. If the model's output depends on this stage's layers in any
   other way, it is refused.
4. `calls`: each module of the stage gets a subclass of its class that wraps its calls, outside all
   hooks, compiled code and the class's own `__call__`. The wrapper lets no stand-in in.
5. The first forward of a kind runs uncompiled, finds the other tensors to send, and has its
   failures explained.

The forward does not use the other files: `ties` sums gradients of parameters that several ranks
hold, `weights` postpones weight gradients of `nn.Linear` if a schedule splits backwards, and
`materialize` fills a model built on meta.
"""
