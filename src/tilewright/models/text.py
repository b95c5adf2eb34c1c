"""Text to token ids and back, and the chat template of a checkpoint."""

import json
from pathlib import Path
from typing import Any

from tilewright.models.checkpoint import CheckpointError


class Tokenizer:
    """The tokenizer.json of a checkpoint, with the special tokens and the chat template of tokenizer_config.json."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; pass the one that has config.json and tokenizer.json")
        if not path.exists():
            other = (
                "; tiktoken.model needs code of the checkpoint, which is never run"
                if list(folder.glob("*tiktoken*"))
                else ""
            )
            raise CheckpointError(f"{folder} has no tokenizer.json{other}: convert its tokenizer first, or pass ids")
        try:
            import tokenizers
        except ImportError:
            raise CheckpointError("text needs the tokenizers package: pip install 'tilewright[models]'") from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # The library raises plain Exceptions.
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        self._values = _read(folder / "tokenizer_config.json")
        template = folder / "chat_template.jinja"
        self._template = template.read_text() if template.exists() else self._values.get("chat_template")

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], *, special: bool = False) -> str:
        """The text of ids; special tokens are left out unless `special`."""
        return self._tokenizer.decode(ids, skip_special_tokens=not special)

    def id_of(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    @property
    def has_chat_template(self) -> bool:
        return isinstance(self._template, str)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids of a conversation, [{"role": "user", "content": "..."}], up to where the assistant answers.

        The template is text of the checkpoint. It is rendered in a sandbox that can neither import nor call anything.
        """
        if not self.has_chat_template:
            raise CheckpointError("this checkpoint has no chat template, as instructed models have; give it plain text")
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise CheckpointError("chat templates need the jinja2 package: pip install 'tilewright[models]'") from None
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        names = ("bos_token", "eos_token", "pad_token")
        tokens = {name: _text(self._values.get(name)) for name in names if self._values.get(name) is not None}
        rendered = environment.from_string(str(self._template)).render(
            messages=messages, add_generation_prompt=True, **tokens
        )
        return self.encode(rendered)


def stop_tokens(folder: str | Path) -> tuple[int, ...]:
    """The ids that end a text: eos_token_id of generation_config.json, or of config.json."""
    folder = Path(folder)
    for name in ("generation_config.json", "config.json"):
        values = _read(folder / name)
        found = values.get("eos_token_id") or values.get("text_config", {}).get("eos_token_id")
        if found is not None:
            return tuple(found) if isinstance(found, list) else (int(found),)
    return ()


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    return values if isinstance(values, dict) else {}


def _text(token: Any) -> str:
    """A special token is text, or an object that has it."""
    return token["content"] if isinstance(token, dict) else str(token)
