"""Compile for a TPU without one; read the schedule; estimate. `tilewright compile` on the command line."""

from tilewright.aot.compiler import TPUS as TPUS
from tilewright.aot.compiler import CompileReport as CompileReport
from tilewright.aot.compiler import KernelReport as KernelReport
from tilewright.aot.compiler import compile as compile
from tilewright.aot.compiler import compile_each as compile_each
from tilewright.aot.toolchain import NotSetUp as NotSetUp
from tilewright.aot.toolchain import doctor as doctor
