"""A call of `moe_route`."""

from jaxtyping import Array, Float

from tilewright.core.call import Call, array, option


class RouteCall(Call):
    """The C = k best of E experts per token, and their weights. Each token is a call of its own."""

    independent = (("*tokens",),)
    outputs = ("*tokens C", "*tokens C")

    logits: Float[Array, "*tokens E"] = array(batch=True)
    bias: Float[Array, " E"] | None = array(differentiable=False)
    """Added to the scores for the choice only."""
    k: int = option()
    scoring: str = option()
    normalize: bool = option()
    scale: float = option()
    groups: tuple[int, int] | None = option()
    """The number of groups of experts, and how many of them a token may choose from."""
