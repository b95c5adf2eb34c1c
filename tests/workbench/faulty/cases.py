"""One case per fault, and one without."""

from tilewright.core.case import Case, Input, Work


def _case(name: str, fault: str | None) -> Case:
    nothing = Work(flops=0.0, bytes=2.0 * 4 * 128 * 128)
    return Case(
        op="double",
        name=name,
        inputs={"x": Input((128, 128))},
        outputs=("doubled",),
        work=lambda itemsize: nothing,
        work_grad=lambda itemsize: nothing,
        options={"fault": fault},
        small=True,
    )


CASES = (
    _case("sound", None),
    _case("race", "race"),
    _case("scratch", "scratch"),
    _case("sum", "sum"),
    _case("carried", "carried"),
    _case("sum_in_order", "sum in order"),
)
