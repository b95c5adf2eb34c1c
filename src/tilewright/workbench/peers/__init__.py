"""Other people's kernels on the bench's inputs, beside ours. They are never dependencies: what is not installed is absent.

A peer (`registry.py`) has one adapter or more, each a module `with_<library>.py` that imports nothing heavy until called:

- `OPS`: by op, a function of the case's arrays and options by keyword that returns a tuple of outputs. Its signature is its
  coverage: a case with an array or option that it does not take is not for it.
- `OUTPUTS`: by op, which of the op's outputs it makes, where not all. The gradient of the others is 0 then.
- `LAYOUTS`: by op and array, a pair of functions: to the layout or dtype that its users hold the array in, and of its
  gradient back. They run outside of what is timed.
- `INSTEAD`: by op, options to be judged by instead of the case's, where it has no way to do just the case.
- `DISTRIBUTIONS`: what is installed under which name, for the versions in a record.
- `unavailable()`: why it cannot run on this device, for those that run in this process.

JAX's own run in this process, compiled and timed as ours are. Those on torch run in a process of their own (`beside.py`
here, `child.py` there). JAX and torch each keep the GPU memory they once had, so in one process the second would see less;
a peer's crash must not take the bench with it; and the two may be installed in different environments. The process is
started for one case and ends with it, and nothing runs on the GPU here in the meantime.
"""
