"""A rank's stages: a plain model cut in place, with its own forward run on each stage.

Every stage runs the whole forward with the same arguments as a single process, but computes only
its own modules: ARCHITECTURE.md has the steps and a picture. A forward passes `stage`, `passage`,
`calls`, `cut` and `stand_ins`. The other files sum gradients of parameters that several ranks hold
(`ties`), postpone weight gradients if a schedule splits backwards (`weights`), and fill a model
built on meta (`materialize`).
"""
