"""Arrays, gradients and memory in torch, for `child.py`. It does not import tilewright, which may not be installed."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

Loaded = dict[str, Any]


def check() -> None:
    if not torch.cuda.is_available():
        raise NotImplementedError(f"torch {torch.__version__} sees no CUDA device, and it is compared on a GPU only")


class Quantized(NamedTuple):
    """A quantised array, as tilewright's `QuantizedArray`."""

    stored: Any
    scales: Any
    dtype: str
    layout: str


quantized = Quantized


def load(array: np.ndarray, dtype: str) -> Any:
    """A tensor on the GPU. numpy has no bfloat16 and no float8, so such an array is passed as its bits."""
    if dtype.startswith("float8"):
        return torch.from_numpy(array).view(getattr(torch, dtype)).cuda()
    if dtype == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()
    return torch.from_numpy(array).cuda()


def store(tensor: Any) -> tuple[np.ndarray, str]:
    """The tensor as an array, and the name of its dtype."""
    tensor = tensor.detach().contiguous().cpu()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16), "bfloat16"
    array = tensor.numpy()
    return array, array.dtype.name


def wait(_: Any) -> None:
    torch.cuda.synchronize()


def step(
    function: Callable[[Loaded], tuple[Any, ...]],
    arrays: Loaded,
    differentiable: list[str],
    cotangents: list[Any] | None,
) -> Callable[[], tuple[tuple[Any, ...], tuple[Any, ...]]]:
    """A function that returns the outputs and, with cotangents, the gradients of the differentiable arrays."""
    if cotangents is None:

        def forward() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
            with torch.no_grad():
                return function(arrays), ()

        return forward
    leaves = [arrays[name].requires_grad_() for name in differentiable]

    def both() -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs = function(arrays)
        gradients = torch.autograd.grad(outputs, leaves, cotangents)
        return tuple(output.detach() for output in outputs), gradients

    return both


def memory(run: Callable[[], Any], held: list[Any]) -> dict[str, int]:
    """The memory of one call: `temp_bytes` is without arguments and results, `peak_bytes` includes them."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outputs, gradients = run()
    torch.cuda.synchronize()
    made = torch.cuda.max_memory_allocated() - before
    tensors = [each for tensor in held for each in (tensor[:2] if isinstance(tensor, tuple) else (tensor,))]
    arguments = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    results = sum(tensor.numel() * tensor.element_size() for tensor in (*outputs, *gradients))
    return {"temp_bytes": max(made - results, 0), "peak_bytes": made + arguments}


def kernels(run: Callable[[], Any], calls: int) -> list[tuple[str, float, float]]:
    """The kernels and copies of so many calls: name, start and duration in seconds, in the order in which they began."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    on_device = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found = [(event.name, event.time_range.start / 1e6, event.time_range.elapsed_us() / 1e6) for event in on_device]
    return sorted(found, key=lambda each: each[1])


def toolchain() -> dict[str, str]:
    """Versions that are not those of an installed package."""
    return {"torch's CUDA": str(torch.version.cuda)}


def device() -> str:
    return torch.cuda.get_device_name()
