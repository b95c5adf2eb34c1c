"""`tilewright generate`: text and ids from a checkpoint, and one line for what is wrong."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tilewright.cli.main import app
from tilewright.cli.screen import Mistake

GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "models" / "qwen3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint_with_tokenizer(tmp_path_factory.mktemp("model") / "qwen3")


def checkpoint_with_tokenizer(folder: Path) -> Path:
    """Makes a checkpoint with a tokenizer: each id is a word, w0, w1, ..., and every other word is w0."""
    tokenizers = pytest.importorskip("tokenizers")
    shutil.copytree(GOLDEN, folder)
    words = {f"w{number}": number for number in range(320)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}w9 {{ message.content }} {% endfor %}w11"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


def run(*arguments: str, **options: str) -> str:
    result = CliRunner().invoke(app, ["generate", *arguments, "--dtype", "float32"], **options)  # type: ignore[arg-type]
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_ids_are_continued() -> None:
    golden = np.load(GOLDEN / "golden.npz")
    prompt, want = golden["input_ids"][0, :16], golden["generated"][0, 16:20]
    out = run(str(GOLDEN), "--ids", " ".join(map(str, prompt)), "--max-new-tokens", "4")
    assert out.split() == [str(token) for token in want]


@pytest.mark.slow
def test_text_is_streamed_and_chats_go_through_the_template(folder: Path) -> None:
    out = run(str(folder), "--prompt", "w5 w6", "--max-new-tokens", "3")
    assert out.startswith("w5 w6")
    assert len(out.removeprefix("w5 w6").split()) == 3
    chat = run(str(folder), "--prompt", "w5", "--chat", "--max-new-tokens", "3")
    assert chat.split() == run(str(folder), "--prompt", "w9 w5 w11", "--max-new-tokens", "3").split()[2:][-3:]
    conversation = run(str(folder), "--interactive", "--max-new-tokens", "3", input="w5\n\n")
    assert conversation.removeprefix("> ").split()[:3] == chat.split()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((), "give one of --prompt, --ids and --interactive"),
        (("--prompt", "a", "--ids", "1"), "give one of"),
        (("--ids", "one"), "must be numbers"),
        (("--ids", "999"), "input_ids has 999, and the vocabulary has 320 tokens"),
        (("--prompt", "a"), r"has no tokenizer\.json"),
        (("--ids", "1", "--chat"), "--chat is for a --prompt"),
        (("--ids", "1 2", "--capacity", "2"), "--capacity 2 is too small for 2 tokens .*; use --capacity 258"),
        (("--ids", "1", "--temperature", "-1"), "temperature=-1.0 must be 0"),
        (("--ids", "1", "--max-new-tokens", "0"), "must be at least 1"),
    ],
)
def test_what_is_wrong_is_one_line(arguments: tuple[str, ...], told: str) -> None:
    with pytest.raises(Mistake, match=told):
        run(str(GOLDEN), *arguments)
