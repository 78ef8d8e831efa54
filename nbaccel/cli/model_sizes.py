"""Sizes of a model on disk: from the headers of its safetensors, or built without weights.

Headers are read without torch; a model of transformers is built with its parameters on ``meta``.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.config.mistakes import closest
from nbaccel.memory.model_size import Shape, measure

_CONFIG_FILE = "config.json"
_INDEX_ENDING = ".safetensors.index.json"
_KNOWN_LIBRARY = "transformers"


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What an estimate needs of a model.

    Attributes:
        source: Where it was found.
        origin: How it was read, for people.
        shape: Parameters in all, in the largest module, and of each tensor.
        largest_layer: Numbers in the largest layer that is kept together.
        module: The model on ``meta``; None where only headers were read.
        notes: Notes about these sizes.
    """

    source: Path
    origin: str
    shape: Shape
    largest_layer: int
    module: Any = None
    notes: tuple[str, ...] = ()


def read_model(
    model_path: str, *, trust_remote_code: bool = False, library_name: str = _KNOWN_LIBRARY
) -> ModelSizes:
    """Read a model's sizes."""
    if library_name != _KNOWN_LIBRARY:
        raise ConfigError(
            f"library_name={library_name!r} is not supported: models are built by transformers, or "
            "read from safetensors. Give a folder with safetensors, and leave it out."
        )
    source = Path(model_path).expanduser()
    if not source.exists():
        return _named_model(model_path)
    file = source / _CONFIG_FILE if source.is_dir() else source
    if file.name == _CONFIG_FILE and file.is_file():
        return _built_model(file, trust_remote_code=trust_remote_code)
    return _stored_model(source)


# ------------------------------------------------------------------------------ headers
def _stored_model(source: Path) -> ModelSizes:
    numbers_by_tensor: dict[str, int] = {}
    for path in _weight_files(source):
        numbers_by_tensor |= _header_of(path)
    by_module: dict[str, int] = defaultdict(int)
    by_layer: dict[str, int] = defaultdict(int)
    for name, count in numbers_by_tensor.items():
        by_module[name.rpartition(".")[0]] += count
        by_layer[_layer_name(name)] += count
    total = sum(numbers_by_tensor.values())
    return ModelSizes(
        source=source,
        origin="headers of safetensors",
        shape=Shape(
            total=total,
            largest_layer=max(by_module.values()),
            trainable=total,
            sizes=tuple(numbers_by_tensor.values()),
        ),
        largest_layer=max(by_layer.values()),
        notes=("A layer is what stands under one number: model.layers.0, for example.",),
    )


def _weight_files(source: Path) -> list[Path]:
    if source.name.endswith(_INDEX_ENDING):
        return _indexed_files(source)
    if source.is_file():
        return [source]
    index_files = sorted(source.glob(f"*{_INDEX_ENDING}"))
    files = _indexed_files(index_files[0]) if index_files else sorted(source.glob("*.safetensors"))
    if not files:
        raise ConfigError(
            f"{source} has neither {_CONFIG_FILE} nor safetensors in it. There is nothing to "
            "estimate from. Give the folder of a model; weights in .bin have no header to read."
        )
    return files


def _indexed_files(index_file: Path) -> list[Path]:
    try:
        weight_map = json.loads(index_file.read_text(encoding="utf-8"))["weight_map"]
        return [index_file.parent / name for name in sorted(set(weight_map.values()))]
    # The file may hold any JSON: a wrong shape shows as one of these.
    except (*(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError),) as error:
        raise CheckpointDamaged(
            f"{index_file} is no index of safetensors: {error!r}. Which files belong to the model "
            "is not known. Copy it again, or give one of its files."
        ) from error


def _header_of(path: Path) -> dict[str, int]:
    """How many numbers each tensor of a file has."""
    from safetensors import SafetensorError, safe_open

    try:
        # Only the header is read; "numpy" keeps torch out.
        with safe_open(path, framework="numpy") as file:
            return {name: math.prod(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointDamaged(
            f"{path} cannot be read as safetensors: {error}. Its sizes are not known. Copy it "
            "again, or give another file."
        ) from error


def _layer_name(tensor_name: str) -> str:
    """The module up to its first number, which is a block of a stack; else the tensor's own."""
    parts = tensor_name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts[:-1] if numbered is None else parts[: numbered + 1])


# ------------------------------------------------------------------------------- config
def _built_model(config_file: Path, *, trust_remote_code: bool) -> ModelSizes:
    transformers = _transformers(f"Building the model of {config_file}")
    try:
        config = transformers.AutoConfig.from_pretrained(
            config_file.parent, local_files_only=True, trust_remote_code=trust_remote_code
        )
        return _sizes_of(config, config_file.parent, transformers)
    except Exception as error:  # the configuration may be of any model, with code of its own
        raise ConfigError(
            f"The model of {config_file} cannot be built: {type(error).__name__}: {error}. Its "
            "sizes are not known. Give a file of its safetensors, or --trust-remote-code where "
            "its folder has code that you trust."
        ) from error


def _named_model(name: str) -> ModelSizes:
    """A kind of model that transformers knows, in the size that is its default."""
    from nbaccel.base.optional_packages import is_installed

    # Without it, what is wrong with a path that was mistyped is not that it is missing.
    transformers = _transformers("Building a model") if is_installed("transformers") else None
    kinds = transformers.CONFIG_MAPPING if transformers else {}
    if name not in kinds:
        raise ConfigError(
            f"{name!r} is no file or folder here, and no kind of model of transformers."
            f"{closest(name, kinds)} Nothing is downloaded for an estimate. Fetch it first: hf "
            f"download {name} --local-dir FOLDER (--include config.json is enough), and give the "
            "folder."
        )
    note = f"The size is the default of this kind. Others are in the config.json of a {name}."
    return replace(_sizes_of(kinds[name](), Path(name), transformers), notes=(note,))


def _transformers(why: str) -> Any:
    from nbaccel.base.optional_packages import require

    return require("transformers", extra="", why=why)


def _sizes_of(config: Any, source: Path, transformers: Any) -> ModelSizes:
    from nbaccel.big_modeling import init_empty_weights

    with init_empty_weights():
        module = _class_of(config, transformers)(config)
    module.tie_weights()
    return ModelSizes(
        source=source,
        origin=f"{type(module).__name__} of transformers, built without weights",
        shape=measure(module),
        largest_layer=_largest_layer(module),
        module=module.float(),
    )


def _class_of(config: Any, transformers: Any) -> Any:
    """What builds the model: the class that its configuration names, else the base model."""
    names: Iterable[str] = getattr(config, "architectures", None) or ()
    named_class = next((getattr(transformers, name, None) for name in names), None)
    return named_class or transformers.AutoModel.from_config


def _largest_layer(module: Any) -> int:
    """Numbers in the largest layer that its model keeps together."""
    from nbaccel.bigmodel.module_sizes import calculate_maximum_sizes

    # In bytes of one format, so that they count numbers.
    _, (layer_bytes, _) = calculate_maximum_sizes(module.float())
    return layer_bytes // 4
