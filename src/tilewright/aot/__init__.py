"""Compiles for TPUs and GPUs that are not attached, reads what comes out, and estimates times: `tilewright compile`."""

from tilewright.aot.compiler import GPUS as GPUS
from tilewright.aot.compiler import TPUS as TPUS
from tilewright.aot.compiler import CompileReport as CompileReport
from tilewright.aot.compiler import KernelReport as KernelReport
from tilewright.aot.compiler import MemoryProbe as MemoryProbe
from tilewright.aot.compiler import compile as compile
from tilewright.aot.compiler import compile_each as compile_each
from tilewright.aot.compiler import probe_memory as probe_memory
from tilewright.aot.sass import Binary as Binary
from tilewright.aot.toolchain import NotSetUp as NotSetUp
from tilewright.aot.toolchain import doctor as doctor
