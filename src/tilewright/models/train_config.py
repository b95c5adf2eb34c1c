"""The configuration of a training run: a TOML file, as frozen dataclasses, one per table.

Every mistake in a file is a `TrainConfigError` of one line that names the table, the key and what it takes.
"""

import dataclasses
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewright.core.arguments import SEEDS
from tilewright.core.nearest import did_you_mean

REMAT = ("none", "full", "dots", "ops")
SCHEDULES = ("constant", "linear", "cosine")
_DTYPES = ("bfloat16", "float32")
_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a text",
    Path: "a path",
    tuple[str, ...]: "a list of texts",
    tuple[Path, ...]: "a list of paths",
    Mapping[str, Any]: "a table",
}


class TrainingError(ValueError):
    """A run that cannot begin or go on. The text is one line."""


class TrainConfigError(ValueError):
    """A configuration that no run can be made from. The text is one line."""


@dataclass(frozen=True, kw_only=True)
class ModelTable:
    """`[model]`: which model. Exactly one of `config` and `path`."""

    config: Mapping[str, Any] | None = None
    """The values of a config.json."""
    path: Path | None = None
    """A folder with config.json."""
    pretrained: bool = False
    """Whether the weights of `path` are the first ones; otherwise they are random."""

    def __post_init__(self) -> None:
        if (self.config is None) == (self.path is None):
            raise TrainConfigError("needs one of config (a table) and path (a folder with config.json), and not both")
        if self.pretrained and self.path is None:
            raise TrainConfigError("pretrained=true needs a path, the folder that has the weights")


@dataclass(frozen=True, kw_only=True)
class DataTable:
    """`[data]`: what it learns. Exactly one of `text` and `tokens`."""

    seq_len: int
    """The tokens of a row. Documents are packed into rows, and do not see each other."""
    text: tuple[Path, ...] = ()
    """UTF-8 files."""
    tokenizer: str = "bytes"
    """"bytes", whose vocabulary is 256, or the path of a tokenizer.json."""
    separator: str = ""
    """The text between two documents of a file; empty where each file is one document."""
    tokens: Path | None = None
    """A .npy file with a one-dimensional array of token ids. It is mapped, not read into memory."""
    end_of_document: int | None = None
    """The id after which a document of `tokens` ends; it is appended to each document of `text`."""

    def __post_init__(self) -> None:
        _positive(self, "seq_len")
        if bool(self.text) == (self.tokens is not None):
            raise TrainConfigError("needs one of text (a list of files) and tokens (a .npy file), and not both")


@dataclass(frozen=True, kw_only=True)
class TrainTable:
    """`[train]`: how long, on how much at once, and the loss."""

    steps: int
    batch_size: int = 8
    """Rows of a microbatch."""
    accumulate: int = 1
    """Microbatches of a step, whose gradients are summed one after the other."""
    seed: int = 0
    """Decides the random weights and the order of the rows."""
    dtype: str = "bfloat16"
    """Of weights and activations in a forward and backward pass. Master weights and the optimizer are float32."""
    remat: str = "none"
    """What the backward pass keeps of each layer: see `tilewright.models.objective.remat_policy`."""
    prefetch: bool = False
    """Whether the backward pass gathers weights that are cut over "fsdp" one repeat ahead (docs/parallel.md)."""
    clip_norm: float = 1.0
    """The largest norm of all gradients together; 0 for no limit."""
    z_loss: float = 0.0
    """The factor of logsumexp^2 of the head's logits."""
    moe_load_balance: float = 0.001
    moe_z_loss: float = 0.0
    moe_bias_rate: float = 0.0
    """How far a step moves each expert's selection bias towards an even load, in models that have one (Kimi Linear)."""

    def __post_init__(self) -> None:
        _positive(self, "steps", "batch_size", "accumulate")
        if not 0 <= self.seed < SEEDS:
            raise TrainConfigError(f"seed={self.seed} must be from 0 to {SEEDS - 1}")
        _not_negative(self, "clip_norm", "z_loss", "moe_load_balance", "moe_z_loss", "moe_bias_rate")
        _one_of(self, "dtype", _DTYPES)
        _one_of(self, "remat", REMAT)


@dataclass(frozen=True, kw_only=True)
class OptimizerTable:
    """`[optimizer]`: AdamW and the schedule of its learning rate."""

    learning_rate: float = 3e-4
    schedule: str = "cosine"
    """"constant", or "linear" or "cosine" from `learning_rate` to `final_fraction` of it at the last step."""
    warmup_steps: int = 0
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices; norms, biases and rates of gates have none."""

    def __post_init__(self) -> None:
        _not_negative(self, "learning_rate", "warmup_steps", "final_fraction", "b1", "b2", "eps", "weight_decay")
        _one_of(self, "schedule", SCHEDULES)
        for name in ("b1", "b2"):
            if getattr(self, name) >= 1:
                raise TrainConfigError(f"{name}={getattr(self, name)} must be less than 1")


@dataclass(frozen=True, kw_only=True)
class CheckpointTable:
    """`[checkpoint]`: how often, and how many of the newest stay."""

    every: int = 100
    keep: int = 2

    def __post_init__(self) -> None:
        _positive(self, "every", "keep")


@dataclass(frozen=True, kw_only=True)
class LoraTable:
    """`[lora]`: only low-rank factors of some projections are trained."""

    rank: int
    alpha: float
    """The factors' product is multiplied by alpha / rank."""
    targets: tuple[str, ...]
    """Names of projections, such as "q_proj" and "o_proj"; in every layer that has them."""

    def __post_init__(self) -> None:
        _positive(self, "rank")
        if not self.targets:
            raise TrainConfigError('targets=[] trains nothing; name projections, such as ["q_proj", "v_proj"]')


@dataclass(frozen=True, kw_only=True)
class MeshTable:
    """`[mesh]`: into how many parts what is cut. One of them may be -1, for the devices that the others leave."""

    data: int = 1
    """Parts of the batch."""
    fsdp: int = 1
    """Parts of the batch and of every weight, which is gathered where it is used."""
    tensor: int = 1
    """Parts of heads, hidden channels and the vocabulary."""
    expert: int = 1
    """Parts of the experts."""
    pipeline: int = 1
    """Parts of the layers, which are the stages of a pipeline."""
    context: int = 1
    """Parts of every sequence."""

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size < 1 and size != -1:
                raise TrainConfigError(f"{name}={size} must be positive, or -1 for the devices that are left")


@dataclass(frozen=True, kw_only=True)
class PipelineTable:
    """`[pipeline]`: how a batch goes through the stages of a mesh with pipeline > 1."""

    microbatches: int = 0
    """The parts of a batch that follow each other, a multiple of the stages; 0 for up to four per stage."""
    interleave: int = 1
    """The groups of layers that each stage has. More of them make the bubble smaller, and move the weights in each step."""

    def __post_init__(self) -> None:
        _not_negative(self, "microbatches")
        _positive(self, "interleave")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run."""

    model: ModelTable
    data: DataTable
    train: TrainTable
    optimizer: OptimizerTable = field(default_factory=OptimizerTable)
    checkpoint: CheckpointTable = field(default_factory=CheckpointTable)
    lora: LoraTable | None = None
    mesh: MeshTable | None = None
    pipeline: PipelineTable = field(default_factory=PipelineTable)

    @staticmethod
    def read(path: str | Path) -> "TrainConfig":
        """The configuration of a TOML file. Paths in it are relative to its folder."""
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text())
        except FileNotFoundError:
            raise TrainConfigError(
                f"{path} does not exist; pass a TOML file, such as examples/tiny_hybrid.toml"
            ) from None
        except IsADirectoryError:
            raise TrainConfigError(f"{path} is a folder; pass a TOML file") from None
        except (ValueError, OSError) as error:
            raise TrainConfigError(f"{path} cannot be read as TOML: {error}") from error
        return TrainConfig.of(values, path)

    @staticmethod
    def of(values: Mapping[str, Any], path: str | Path = "config.toml") -> "TrainConfig":
        """The configuration of the values of a TOML file."""
        path = Path(path)
        if unknown := [name for name in values if name not in _TABLES]:
            hint = did_you_mean(unknown[0], _TABLES)
            raise TrainConfigError(f"{path}: [{unknown[0]}] is not known; the tables are {', '.join(_TABLES)}{hint}")
        tables = {}
        for name, kind in _TABLES.items():
            given = values.get(name)
            if given is None and name in _NEEDED:
                raise TrainConfigError(f"{path} has no table [{name}], which it needs")
            if given is None:
                continue
            if not isinstance(given, dict):
                raise TrainConfigError(f"{path}: {name}={given!r} must be a table, [{name}]")
            try:
                # Whole paths: a run is the same one from every working directory.
                tables[name] = _read_table(kind, given, path.parent.resolve())
            except TrainConfigError as error:
                raise TrainConfigError(f"{path}: [{name}] {error}") from None
        return TrainConfig(**tables)

    def with_steps(self, steps: int) -> "TrainConfig":
        """This run with another number of steps, which the schedule of the learning rate ends with, too."""
        return dataclasses.replace(self, train=dataclasses.replace(self.train, steps=steps))

    def identity(self) -> dict[str, Any]:
        """What must be equal where a run is resumed: everything but its length, its checkpoints and its mesh.

        Files are there by name, since they may be moved with the run; a checksum of the tokens is part of a run, too.
        """
        values = dataclasses.asdict(self)
        values["data"]["tokenizer"] = Path(self.data.tokenizer).name
        del (
            values["checkpoint"],
            values["mesh"],
            values["pipeline"],
            values["train"]["steps"],
            values["train"]["prefetch"],
        )
        return _as_json(values)


_TABLES: dict[str, Any] = {
    "model": ModelTable,
    "data": DataTable,
    "train": TrainTable,
    "optimizer": OptimizerTable,
    "checkpoint": CheckpointTable,
    "lora": LoraTable,
    "mesh": MeshTable,
    "pipeline": PipelineTable,
}
_NEEDED = ("model", "data", "train")


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    if isinstance(value, Path):
        return value.name if value.is_file() else str(value)
    return value


def _read_table(kind: Any, given: dict[str, Any], folder: Path) -> Any:
    hints = typing.get_type_hints(kind)
    fields = {each.name: each for each in dataclasses.fields(kind)}
    read = {}
    for key, value in given.items():
        if key not in fields:
            raise TrainConfigError(f"has no key {key!r}; its keys are {', '.join(fields)}{did_you_mean(key, fields)}")
        hint = hints[key]
        wanted = typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint  # Of `int | None`, int.
        read[key] = _typed(key, value, wanted, folder)
    for key, each in fields.items():
        if key not in read and each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            raise TrainConfigError(f"has no {key}, which it needs")
    return kind(**read)


def _typed(key: str, value: Any, wanted: Any, folder: Path) -> Any:
    if wanted is bool and isinstance(value, bool):
        return value
    if wanted in (int, float) and isinstance(value, int) and not isinstance(value, bool):
        return wanted(value)
    if wanted is float and isinstance(value, float):
        return value
    if wanted is str and isinstance(value, str):
        return str(folder / value) if key == "tokenizer" and value != "bytes" else value
    if wanted is Path and isinstance(value, str):
        return _existing(key, folder / value)
    if wanted == tuple[str, ...] and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(value)
    if wanted == tuple[Path, ...] and isinstance(value, list) and all(isinstance(each, str) for each in value):
        return tuple(_existing(key, folder / each) for each in value)
    if wanted == Mapping[str, Any] and isinstance(value, dict):
        return value
    raise TrainConfigError(f"{key}={value!r} must be {_KINDS[wanted]}")


def _existing(key: str, path: Path) -> Path:
    if not path.exists():
        raise TrainConfigError(f"{key}: {path} does not exist")
    return path


def _positive(table: Any, *names: str) -> None:
    for name in names:
        if getattr(table, name) < 1:
            raise TrainConfigError(f"{name}={getattr(table, name)} must be positive")


def _not_negative(table: Any, *names: str) -> None:
    for name in names:
        if not getattr(table, name) >= 0:
            raise TrainConfigError(f"{name}={getattr(table, name)} must be 0 or more")


def _one_of(table: Any, name: str, known: tuple[str, ...]) -> None:
    if getattr(table, name) not in known:
        hint = did_you_mean(getattr(table, name), known)
        raise TrainConfigError(f"{name}={getattr(table, name)!r} is not known; use {', '.join(known)}{hint}")
