"""`tilewright generate`: text, or token ids, from a checkpoint."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.cli.screen import Mistake, arguments


def generate(
    model_dir: Annotated[Path, typer.Argument(help="a folder with config.json and safetensors")],
    prompt: Annotated[str | None, typer.Option(help="the text to continue")] = None,
    ids: Annotated[str | None, typer.Option(help="token ids instead of text, such as '1 15 7'")] = None,
    chat: Annotated[bool, typer.Option(help="put the prompt into the checkpoint's chat template")] = False,
    interactive: Annotated[bool, typer.Option(help="chat: a line is a message; an empty line ends")] = False,
    max_new_tokens: Annotated[int, typer.Option(help="at most so many tokens")] = 256,
    temperature: Annotated[float, typer.Option(help="0: the most probable token")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="draw from the k most probable tokens")] = None,
    top_p: Annotated[float | None, typer.Option(help="draw from tokens that have this probability together")] = None,
    seed: Annotated[int, typer.Option(help="of the random numbers")] = 0,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32")] = "bfloat16",
    quantize: Annotated[str | None, typer.Option(help="int8, int4 or float8_e4m3fn weights")] = None,
    capacity: Annotated[
        int | None, typer.Option(help="tokens that the cache has room for; 8192 for a chat, else as many as it needs")
    ] = None,
) -> None:
    """Generate text from a checkpoint, printed token by token."""
    from tilewright import models
    from tilewright.models.text import Tokenizer, stop_tokens

    if sum([prompt is not None, ids is not None, interactive]) != 1:
        raise Mistake("give one of --prompt, --ids and --interactive")
    if chat and prompt is None:
        raise Mistake("--chat is for a --prompt: ids are read as they are, and --interactive is a chat")
    with arguments():
        sampling = models.Sampling(temperature, top_k, top_p)
        if max_new_tokens < 1:
            raise ValueError(f"--max-new-tokens {max_new_tokens} must be at least 1")
        tokenizer = None if ids is not None else Tokenizer(model_dir)
        if (chat or interactive) and tokenizer is not None and not tokenizer.has_chat_template:
            raise ValueError(f"{model_dir} has no chat template; use --prompt without --chat, whose text it continues")
        given = _ids(ids) if ids is not None else None
        model = models.load(model_dir, dtype=dtype, quantize=quantize)
        stops = stop_tokens(model_dir)
        if given is not None:
            prompt_ids = given
        elif not interactive and tokenizer is not None and prompt is not None:
            prompt_ids = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
        else:
            prompt_ids = []
    if interactive:
        assert tokenizer is not None
        _converse(model, tokenizer, sampling, stops, seed, max_new_tokens, capacity or 8192)
        return
    with arguments():
        needed = len(prompt_ids) + max_new_tokens
        room = needed if capacity is None else capacity
        if room < needed:
            raise ValueError(
                f"--capacity {room} is too small for {len(prompt_ids)} tokens and --max-new-tokens {max_new_tokens}; use "
                f"--capacity {needed}, or leave it out"
            )
        batch = models.Batch(model, rows=1, capacity=room, sampling=sampling)
        row = batch.join(prompt_ids, seed=seed)
    if tokenizer is not None and not chat:
        sys.stdout.write(str(prompt))
    for piece in _streamed(batch, row, tokenizer, stops, max_new_tokens, prompt_ids):
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")


def _ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"--ids {text!r} must be numbers, such as '1 15 7'") from None


def _streamed(
    batch: Any, row: int, tokenizer: Any, stops: tuple[int, ...], most: int, before: list[int]
) -> Iterator[str]:
    """The text of each token as it comes: what the tokens so far say more than before, the prompt's included."""
    tokens = list(before)
    shown = "" if tokenizer is None else tokenizer.decode(tokens)
    for _ in range(most):
        token = batch.step()[row]
        if token in stops:
            return
        tokens.append(token)
        if tokenizer is None:
            yield f"{token} "
            continue
        text = tokenizer.decode(tokens)
        if not text.endswith("\ufffd"):  # Half of a character: the next token has the rest.
            yield text[len(shown) :]
            shown = text


def _converse(
    model: Any, tokenizer: Any, sampling: Any, stops: tuple[int, ...], seed: int, most: int, capacity: int
) -> None:
    """A chat. Each message reads the whole conversation again."""
    from tilewright import models

    messages: list[dict[str, str]] = []
    while True:
        try:
            line = input("> ")
        except EOFError:
            return
        if not line.strip():
            return
        messages.append({"role": "user", "content": line})
        with arguments():
            batch = models.Batch(model, rows=1, capacity=capacity, sampling=sampling)
            asked = tokenizer.chat(messages)
            if len(asked) >= capacity:
                raise ValueError(
                    f"the chat has {len(asked)} tokens, all of its --capacity {capacity}; use a larger one"
                )
            row = batch.join(asked, seed=seed + len(messages))
        answer = ""
        for piece in _streamed(batch, row, tokenizer, stops, min(most, capacity - len(asked)), asked):
            answer += piece
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
        messages.append({"role": "assistant", "content": answer})
