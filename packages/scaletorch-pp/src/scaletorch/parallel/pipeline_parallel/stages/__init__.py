"""A rank's stages: a plain model cut, in place, and its own forward run on what is left.

The model's forward is never written anew. It runs on every stage, and these techniques, each in one
file, make it compute that stage alone:

- `cut`: modules of other stages are replaced in their parents by `PassThrough`, which returns its
  first argument. If a rank has several stages, `Chunks` exchanges them in the same way.
- `stage`: forward is called with hidden states in place of `input_ids`, or as `inputs_embeds`.
- `hidden`: hooks on a stage's first and last module take the hidden states that come and go, and
  refuse code around the layers that changes them. The first module may be given a copy.
- `weights`: with a schedule that splits backwards, each `nn.Linear` with torch's own forward gets a
  `forward` of its own that can leave the weight's gradient for later.
- `stand_ins`, `gates`, `gradient`: what stands for another stage's tensors has a class of its own,
  which sees whatever is computed from it; hooks on the stage's modules let nothing of it in but the
  hidden states into the first. A model's code that leaves it alone, as most does, pays nothing.
- `examination`: the first forward of a kind runs uncompiled, and its failures are explained.

Two more belong to `preparation`: `meta_parameters` replaces `nn.Module.register_parameter` while a
model is built, and `measure_costs` hooks the layers of a model that has not been cut.
"""
