"""The named shapes of `absorb_queries` and `expand_values`."""

from tilewright.core.case import Case, Input, Work, normal


def _case(op: str, name: str, b: int, h: int, r: int, c: int, v: int, e: int = 0, *, small: bool = False) -> Case:
    """Heads of c channels for keys, and e that follow them, and v for values, over latents of r channels.

    Bytes are those of the weights that are read, and of what a token reads and writes.
    """
    keys = op == "absorb_queries"
    one, other = (c + e, r + e) if keys else (r, v)
    used = r * h * (c if keys else v)
    flops = 2.0 * b * used
    return Case(
        op=op,
        name=name,
        inputs={
            "q" if keys else "o": Input((b, h, one)),
            "kv_up": Input((r, h, c + v), normal((c if keys else r) ** -0.5)),
        },
        outputs=("y",),
        work=lambda itemsize: Work(flops, float(itemsize * (used + b * h * (one + other)))),
        work_grad=lambda itemsize: Work(3 * flops, float(3 * itemsize * (used + b * h * (one + other)))),
        options={"key_dim": c},
        small=small,
    )


CASES: tuple[Case, ...] = (
    _case("absorb_queries", "few", 3, 2, 128, 64, 64, 64, small=True),
    _case("absorb_queries", "one", 1, 2, 64, 64, 128, small=True),
    _case("absorb_queries", "odd", 2, 3, 24, 12, 8, 4, small=True),
    _case("absorb_queries", "hybrid_1.5b", 1, 16, 512, 128, 128, 64),
    _case("absorb_queries", "hybrid_1.5b_batch_64", 64, 16, 512, 128, 128, 64),
    _case("expand_values", "few", 3, 2, 128, 64, 64, small=True),
    _case("expand_values", "one", 1, 2, 64, 64, 128, small=True),
    _case("expand_values", "odd", 2, 3, 24, 12, 8, small=True),
    _case("expand_values", "hybrid_1.5b", 1, 16, 512, 128, 128),
    _case("expand_values", "hybrid_1.5b_batch_64", 64, 16, 512, 128, 128),
)
