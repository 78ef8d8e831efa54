"""What ``nbaccel estimate-memory`` tells: a model loaded, and trained in each of the ways.

Sizes come from headers of safetensors, or from transformers, which builds the model on ``meta``.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nbaccel.base.errors import CheckpointDamaged, ConfigError
from nbaccel.base.optional_packages import is_installed, require
from nbaccel.base.units import count_noun, format_bytes
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import PRECISIONS
from nbaccel.config.field_rules import refuse_mistakes
from nbaccel.config.given_values import closest
from nbaccel.memory.estimate import Bytes, MemoryEstimate, Shape, measure, table_lines
from nbaccel.memory.memory_model import MemoryModel, ShortFormats
from nbaccel.memory.ways import Candidate, CandidateFinder
from nbaccel.notebook.picker.rendering import ways_lines
from nbaccel.plan import Plan
from nbaccel.plan.inspecting import inspect_machine
from nbaccel.plan.inventory import Gpu, Inventory

_CONFIG_FILE = "config.json"
_INDEX_ENDING = ".safetensors.index.json"
_KNOWN_LIBRARY = "transformers"


@dataclass(frozen=True, kw_only=True)
class ModelSizes:
    """What an estimate needs of a model."""

    source: Path  # where it was found
    origin: str  # how it was read, for people
    shape: Shape  # parameters in all, in the largest module, and of each tensor
    largest_layer: int  # numbers in the largest layer that is kept together
    module: Any = None  # the model on ``meta``; None where only headers were read
    notes: tuple[str, ...] = ()  # notes about these sizes


def read_model(model_path: str, *, trust_remote_code: bool, library_name: str) -> ModelSizes:
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


def _stored_model(source: Path) -> ModelSizes:
    numbers_by_tensor: dict[str, int] = {}
    for path in _weight_files(source):
        numbers_by_tensor |= _header_of(path)
    by_module: dict[str, int] = defaultdict(int)
    by_layer: dict[str, int] = defaultdict(int)
    for name, count in numbers_by_tensor.items():
        by_module[name.rpartition(".")[0]] += count
        # A block of a stack is the module up to its first number.
        parts = name.split(".")
        numbered = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
        by_layer[".".join(parts[:-1] if numbered is None else parts[: numbered + 1])] += count
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


def _built_model(file: Path, *, trust_remote_code: bool) -> ModelSizes:
    transformers: Any = require("transformers", extra="", why=f"Building the model of {file}")
    try:
        config = transformers.AutoConfig.from_pretrained(
            file.parent, local_files_only=True, trust_remote_code=trust_remote_code
        )
        return _sizes_of(config, file.parent, transformers)
    except Exception as error:  # the configuration may be of any model, with code of its own
        raise ConfigError(
            f"The model of {file} cannot be built: {type(error).__name__}: {error}. Its "
            "sizes are not known. Give a file of its safetensors, or --trust-remote-code where "
            "its folder has code that you trust."
        ) from error


def _named_model(name: str) -> ModelSizes:
    """A kind of model that transformers knows, in the size that is its default."""
    # Without it, what is wrong with a path that was mistyped is not that it is missing.
    transformers: Any = None
    if is_installed("transformers"):
        transformers = require("transformers", extra="", why="Building a model")
    kinds = transformers.CONFIG_MAPPING if transformers else {}
    if name not in kinds:
        raise ConfigError(
            f"{name!r} is no file or folder here, and no kind of model of transformers."
            f"{closest(name, kinds)} Nothing is downloaded for an estimate. Fetch it first: hf "
            f"download {name} --local-dir FOLDER (--include config.json is enough), and give that."
        )
    note = f"The size is the default of this kind. Others are in the config.json of a {name}."
    return replace(_sizes_of(kinds[name](), Path(name), transformers), notes=(note,))


def _sizes_of(config: Any, source: Path, transformers: Any) -> ModelSizes:
    from nbaccel.big_modeling import init_empty_weights
    from nbaccel.bigmodel.module_sizes import calculate_maximum_sizes

    # The class that the configuration names, else the base model.
    names: Iterable[str] = getattr(config, "architectures", None) or ()
    named_class = next((getattr(transformers, name, None) for name in names), None)
    with init_empty_weights():
        module = (named_class or transformers.AutoModel.from_config)(config)
    module.tie_weights()
    # In bytes of one format, so that they count numbers.
    _, (layer_bytes, _) = calculate_maximum_sizes(module.float())
    return ModelSizes(
        source=source,
        origin=f"{type(module).__name__} of transformers, built without weights",
        shape=measure(module),
        largest_layer=layer_bytes // 4,
        module=module.float(),
    )


_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "fp8": 8, "int8": 8, "int4": 4}
_TRAINED_FORMATS = ("float32", "float16", "bfloat16")
_ADAM_COPIES = 4  # Weights, gradients and two moments
_ANY_GPU = (10, 0)  # What computes in all formats: nothing is known of a GPU that is not here


def print_estimate(
    model_path: str,
    *,
    dtypes: Sequence[str],
    num_gpus: int,
    num_nodes: int,
    mixed_precision: str,
    trust_remote_code: bool,
    library_name: str,
    as_json: bool,
) -> None:
    """Read a model, estimate its memory, and print both tables."""
    wanted = [("--dtypes", dtype, [*_BITS]) for dtype in dtypes]
    wanted.append(("--mixed-precision", mixed_precision, [row.name for row in PRECISIONS]))
    refuse_mistakes(
        f"{option}={word!r} is no format here.{closest(word, known)} Its size is not known. Give "
        f"of: {', '.join(known)}."
        for option, word, known in wanted
        if word not in known
    )
    sizes = read_model(model_path, trust_remote_code=trust_remote_code, library_name=library_name)
    machine, is_here = _machine_with(num_gpus)
    ways = _trained_ways(sizes, machine, num_gpus, num_nodes, mixed_precision)
    # Nothing is chosen here, and without a device there is no best.
    ways = [replace(one, is_taken=False, is_best=one.is_best and is_here) for one in ways]
    loaded = [_loaded_row(sizes, dtype) for dtype in dtypes]
    notes = [*sizes.notes, "Activations are not in it: they depend on the batch."]
    if as_json:
        told = {
            "model": str(sizes.source),
            "read_from": sizes.origin,
            "parameters": sizes.shape.total,
            "largest_layer_parameters": sizes.largest_layer,
            "loaded": loaded,
            "num_gpus": num_gpus,
            "num_nodes": num_nodes,
            "mixed_precision": mixed_precision,
            "trained": [_trained_row(one, is_here=is_here) for one in ways],
            "notes": notes,
        }
        print(json.dumps(told, indent=2))
        return
    rows: list[tuple[str, ...]] = [("dtype", "largest layer", "total size", "training with Adam")]
    for dtype, *sizes_of in (row.values() for row in loaded):
        rows.append((dtype, *("-" if one is None else format_bytes(one) for one in sizes_of)))
    hosts = "" if num_nodes == 1 else f" on each of {num_nodes} machines"
    gpus = count_noun(num_gpus, "GPU")
    precision = "" if mixed_precision == "no" else f" in {mixed_precision}"
    sections = {
        f"{sizes.source}: {sizes.shape.total:,} parameters ({sizes.origin})": [],
        "Loaded": table_lines(rows),
        f"Trained with Adam on {gpus}{hosts}{precision}": (ways_lines(ways, knows_free=is_here)),
        "Notes": notes,
    }
    for title, lines in sections.items():
        print("\n".join((title, *(f"  {line}" for line in lines), "")))


def _machine_with(num_gpus: int) -> tuple[Inventory, bool]:
    """This machine; or one with so many GPUs, of which it is not known what is free."""
    machine = inspect_machine()
    if len(machine.gpus) >= num_gpus:
        return machine, True
    gpus = (Gpu(index=index, name="", compute_capability=_ANY_GPU) for index in range(num_gpus))
    # A torch that was built for CPUs only would let them lie idle.
    version = machine.torch_version.partition("+")[0]
    return replace(machine, gpus=(*gpus,), host_total_bytes=0, torch_version=version), False


def _loaded_row(sizes: ModelSizes, dtype: str) -> dict[str, Any]:
    total = sizes.shape.total * _BITS[dtype] // 8
    return {
        "dtype": dtype,
        "largest_layer": sizes.largest_layer * _BITS[dtype] // 8,
        "total": total,
        "training": _ADAM_COPIES * total if dtype in _TRAINED_FORMATS else None,
    }


@dataclass(kw_only=True)
class _StoredModel(MemoryModel):
    """A model of which only the sizes of its tensors are known."""

    known_shape: Shape

    @cached_property
    def shape(self) -> Shape:
        return self.known_shape

    def states(self, world_size: int, formats: ShortFormats | None) -> Bytes:
        weight_bytes = 4 * self.shape.total
        return Bytes(
            parameters=weight_bytes,
            gradients=weight_bytes,
            optimizer=2 * weight_bytes,
            # DDP's second copy of the gradients.
            buckets=weight_bytes if world_size > 1 else 0,
        )

    def _sharded(self, config: RunConfig, plan: Plan, inputs: Mapping[str, Any]) -> MemoryEstimate:
        raise ConfigError(
            f"headers do not tell how the layers of its {len(self.shape.sizes)} tensors are "
            "wrapped. What is gathered at once is not known. Give a folder with a config.json."
        )


def _trained_ways(
    sizes: ModelSizes, machine: Inventory, num_gpus: int, num_nodes: int, mixed_precision: str
) -> Sequence[Candidate]:
    known: dict[str, Any] = {"model": sizes.module, "sample_batch": None, "inventory": machine}
    memory_model = MemoryModel(**known)
    if sizes.module is None:
        memory_model = _StoredModel(**known, known_shape=sizes.shape)
    config = RunConfig(
        device="cuda",
        num_processes=num_gpus,
        num_nodes=num_nodes,
        master_addr="another machine",
        mixed_precision=mixed_precision,
    )
    return CandidateFinder(memory_model).find(config)


def _trained_row(candidate: Candidate, *, is_here: bool) -> dict[str, Any]:
    estimate = None if candidate.need is None else candidate.need.estimate
    return {
        "way": candidate.name,
        "per_device": None if estimate is None else estimate.device.peak,
        "per_host": None if estimate is None else estimate.host.peak,
        "fits": candidate.can_be_taken if is_here else None,
        "refusal": candidate.refusal,
    }
