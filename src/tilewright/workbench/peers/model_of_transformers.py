"""A language model of transformers, with fla's kernels where they are installed, for `tilewright bench model`.

It runs in a process of its own (`child.py`) and imports nothing of tilewright. Weights are random. Training is what
Megatron does with bfloat16: parameters and gradients in bfloat16, master weights and AdamW's moments in float32, fused
optimizer steps, clipping. Where fla is installed the loss is its fused one: transformers' own has the logits of all tokens
in memory, several times. Decoding is eager, with a cache that grows.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

DISTRIBUTIONS = ("transformers", "torch", "triton", "fla-core", "flash-linear-attention", "flash-attn", "causal-conv1d")


def run(job: dict[str, Any], samples: Callable[..., Any], versions: Callable[..., Any]) -> dict[str, Any]:
    """Times the job's workload."""
    import torch  # pyright: ignore[reportMissingImports]

    on_gpu = job["platform"] != "cpu"
    if on_gpu and not torch.cuda.is_available():
        raise NotImplementedError(f"torch {torch.__version__} sees no CUDA device")
    device = "cuda" if on_gpu else "cpu"
    model, kernels = _model(job, device)
    workload = job["workload"]
    vocabulary = job["config"]["vocab_size"]
    ids = torch.randint(vocabulary, (workload["batch"], workload["tokens"]), device=device)
    metrics = {"kernels": kernels, "parameters": sum(each.numel() for each in model.parameters())}
    step, calls = {"train": _train, "prefill": _prefill, "decode": _decode}[workload["what"]](model, ids, job)

    def wait(_: Any) -> None:
        if on_gpu:
            torch.cuda.synchronize()

    step()
    wait(None)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        step()
        wait(None)
        metrics["peak_bytes"] = torch.cuda.max_memory_allocated()
    taken = [each / calls for each in samples(step, wait, job["seconds"])]
    return {
        "samples_s": taken,
        "metrics": metrics,
        "versions": versions(DISTRIBUTIONS) | {"torch's CUDA": str(torch.version.cuda)},
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
    }


def _model(job: dict[str, Any], device: str) -> tuple[Any, str]:
    """The model, and the kernels that it runs on, in words."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    values = dict(job["config"])
    has_fla = importlib.util.find_spec("fla") is not None
    has_delta = "linear_attention" in values.get("layer_types", ())
    if has_delta and device == "cuda" and not has_fla:
        raise NotImplementedError(
            "without fla its delta layers are slow reference code in plain torch; pip install flash-linear-attention"
        )
    try:
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    except ValueError as error:
        raise NotImplementedError(f"transformers {transformers.__version__} has no such model: {error}") from error
    # torch's own attention is FlashAttention 2 as well.
    has_flash = device == "cuda" and importlib.util.find_spec("flash_attn") is not None
    attention = "flash_attention_2" if has_flash else "sdpa"
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, job["dtype"]), attn_implementation=attention
        )
    delta = f", delta layers: {'fla' if has_fla else 'plain torch'}" if has_delta else ""
    return model, f"attention: {attention}{delta}"


def _train(model: Any, ids: Any, job: dict[str, Any]) -> tuple[Callable[[], Any], int]:
    import torch  # pyright: ignore[reportMissingImports]

    if job["remat"]:
        model.gradient_checkpointing_enable()
    model.train()
    parameters = [each for each in model.parameters() if each.requires_grad]
    masters = [torch.nn.Parameter(each.detach().float()) for each in parameters]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(
        masters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=ids.device.type == "cuda"
    )

    loss_of = _loss(model, ids)

    def step() -> Any:
        loss = loss_of()
        loss.backward()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                if parameter.grad is None:  # An expert that no token chose.
                    master.grad.zero_()
                else:
                    master.grad.copy_(parameter.grad)
            torch.nn.utils.clip_grad_norm_(masters, 1.0, foreach=True)
            optimizer.step()
            torch._foreach_copy_(parameters, masters)
        model.zero_grad(set_to_none=True)
        return loss.detach()

    return step, 1


def _loss(model: Any, ids: Any) -> Callable[[], Any]:
    """The mean loss of each next token."""
    if ids.device.type != "cuda" or importlib.util.find_spec("fla") is None:
        return lambda: model(input_ids=ids, labels=ids, use_cache=False).loss
    from fla.modules import FusedLinearCrossEntropyLoss  # pyright: ignore[reportMissingImports]

    fused, next_ids = FusedLinearCrossEntropyLoss(), ids[:, 1:].flatten()

    def loss() -> Any:
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return fused(hidden[:, :-1].flatten(0, 1), next_ids, model.get_output_embeddings().weight)

    return loss


def _prefill(model: Any, ids: Any, job: dict[str, Any]) -> tuple[Callable[[], Any], int]:
    import torch  # pyright: ignore[reportMissingImports]

    model.eval()

    def step() -> Any:
        with torch.inference_mode():
            return model(input_ids=ids, use_cache=True, logits_to_keep=1).logits

    return step, 1


def _decode(model: Any, ids: Any, job: dict[str, Any]) -> tuple[Callable[[], Any], int]:
    import torch  # pyright: ignore[reportMissingImports]

    model.eval()
    with torch.inference_mode():
        read = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cache, token = read.past_key_values, read.logits[:, -1:].argmax(-1)

    def step() -> Any:
        nonlocal token
        with torch.inference_mode():
            for _ in range(job["new_tokens"]):
                out = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1)
                token = out.logits[:, -1:].argmax(-1)
        return token

    return step, job["new_tokens"]
