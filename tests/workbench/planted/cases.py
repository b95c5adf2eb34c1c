"""One small case."""

from tilewright.core.case import Case, Input, Work

CASES = (
    Case(
        op="twice",
        name="small",
        inputs={"x": Input((64, 64))},
        outputs=("y",),
        work=lambda itemsize: Work(flops=64.0 * 64, bytes=2.0 * 64 * 64 * itemsize),
        work_grad=lambda itemsize: Work(flops=2 * 64.0 * 64, bytes=4.0 * 64 * 64 * itemsize),
        small=True,
    ),
)
