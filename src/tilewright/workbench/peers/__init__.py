"""Other libraries' kernels, timed on the bench's inputs. They are never dependencies: what is not installed is left out.

A peer (`registry.py`) has one or more adapters, each a module `with_<library>.py` that imports nothing heavy until called:

- `OPS`: for each op, a function of the case's arrays and options by keyword that returns a tuple of outputs. Its signature
  says what it covers: it does not run a case with an array or option that it does not take.
- `OUTPUTS`: for each op, which of the op's outputs it computes, if not all. The cotangents of the others are 0 then.
- `LAYOUTS`: for each op and array, a pair of functions: one converts the array to the layout or dtype that users of the
  library have it in, the other converts its gradient back. They run outside of what is timed.
- `INSTEAD`: for each op, options that replace the case's, where the library cannot compute exactly the case.
- `COMPILER_OPTIONS`: options of XLA that it is compiled with, for adapters that run in this process.
- `DISTRIBUTIONS`: the names of the installed packages whose versions go into a record.
- `unavailable()`: why it cannot run on this device, for adapters that run in this process.

Peers in JAX run in this process, compiled and timed as ours are. Those in torch run in a process of their own (`beside.py`
here, `child.py` there): JAX and torch each keep the GPU memory that they once allocated, so that the second of them would
have less; a crash of a peer must not end the bench; and the two may be installed in different environments. The process
runs one case, and nothing runs on the GPU from here in the meantime.

A quantised array of a case has the fields of a `QuantizedArray` (`stored`, `scales`, `dtype`, `layout`) there, too.
"""
