"""The names of a package: imported when they are first used (PEP 562), and those it lacks.

A package lists them once, as imports under ``if TYPE_CHECKING:``, each ``as`` itself; that block is
read from its source. Using a name of Accelerate that nbaccel lacks says what to do instead.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from nbaccel.base.errors import PlatformUnsupported, UserMistake
from nbaccel.base.frames import running_shell


def names_handed_on(file_path: str) -> dict[str, str]:
    """Name → module of what a package imports for type checkers."""
    tree = ast.parse(Path(file_path).read_text(encoding="utf-8"))
    blocks = (block.body for block in tree.body if isinstance(block, ast.If))
    return {name: home for body in blocks for name, home in _imported_as(body)}


def hand_on(module: dict[str, Any], *own_names: str) -> None:
    """Let a module's ``__all__`` also be what it imports, each ``as`` itself; see `name_own`.

    Not assigned there: type checkers and the documentation take a computed one for an empty one.
    """
    tree = ast.parse(Path(module["__file__"]).read_text(encoding="utf-8"))
    name_own(module, *(name for name, _ in _imported_as(tree.body)), *own_names)


def name_own(module: dict[str, Any], *others: str) -> None:
    """Let a module's ``__all__`` be what it defines, stand-ins of missing names, and others."""
    module.update(missing_names_of(module["__name__"]))
    is_own = {name: getattr(value, "__module__", "") for name, value in module.items()}
    own_names = [name for name, home in is_own.items() if home == module["__name__"]]
    module["__all__"] = [*(name for name in own_names if not name.startswith("_")), *others]


def _imported_as(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for statement in body:
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if alias.asname:
                    yield alias.asname, str(statement.module)


def lazy_names(package: str, homes: dict[str, str]) -> Callable[[str], Any]:
    """What a package calls ``__getattr__``."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return find


@dataclass(frozen=True, slots=True)
class LaterPart:
    """A part of Accelerate that this version lacks."""

    what: str  # what it is, after "belongs to"
    instead: str  # what to do without it, as an instruction


PIPELINE_PARALLELISM = LaterPart(
    "pipeline parallelism for inference",
    "Run the model whole in every process (split_between_processes shares the inputs out), or use "
    "torch.distributed.pipelining in the workers",
)
MIXED_PARALLELISMS = LaterPart(
    "mixing tensor, context, sequence and data parallelism",
    "Give Accelerator a fsdp_plugin, or a deepspeed_plugin with stage 3, for models too big",
)
NOT_INSTALLED = LaterPart(
    "a strategy that was left out of this installation of nbaccel",
    "Install nbaccel whole, or use one of the strategies that are there",
)
MEGATRON_LM = LaterPart("Megatron-LM", "Give Accelerator a fsdp_plugin or a deepspeed_plugin")
QUANTIZED_LOADING = LaterPart(
    "loading models in 8 or 4 bits",
    "Load with from_pretrained(quantization_config=...) of transformers; train adapters of peft",
)
DEEPSPEED_INTERNALS = LaterPart(
    "the inside of Accelerate's DeepSpeed",
    "Use prepare of an Accelerator with a deepspeed_plugin; its configuration is "
    "accelerator.deepspeed_config",
)
FSDP_INTERNALS = LaterPart(
    "the inside of Accelerate's FSDP",
    "Use prepare, save_state, load_state and save_model of an Accelerator with a fsdp_plugin",
)
LAUNCH_COMMANDS = LaterPart(
    "Accelerate's command line", "Use the command nbaccel launch, or notebook_launcher"
)
XLA_INSTALLATION = LaterPart(
    "installing torch_xla from within a program",
    "Install what drives TPUs with pip, torch_tpu or 'torch_xla[tpu]', and restart the notebook; "
    "notebook_launcher and Accelerator need nothing else to train on TPUs",
)


def missing_name_of(missing_name: str, missing_part: LaterPart, module_name: str) -> Any:
    """A stand-in for a class or function of Accelerate."""
    what, instead = missing_part.what, missing_part.instead

    def refuse(*_arguments: Any, **_keywords: Any) -> NoReturn:
        raise PlatformUnsupported(
            f"{missing_name} belongs to {what}, which this version of nbaccel does not have: it "
            f"can be imported, not used. {instead}."
        )

    docs = f"Of Accelerate; not in this version, which lacks {what}. {instead}."
    # As __new__, so that a subclass raises too, whatever its constructor takes.
    attributes = {"__new__": refuse, "_part": missing_part}
    return type(missing_name, (), {**attributes, "__doc__": docs, "__module__": module_name})


_MISSING_NAMES = (
    ("inference", PIPELINE_PARALLELISM, "prepare_pippy"),
    (
        "parallelism_config",
        MIXED_PARALLELISMS,
        "DeepSpeedSequenceParallelConfig ParallelismConfig TorchContextParallelConfig "
        "TorchTensorParallelConfig TorchTensorParallelPlugin",
    ),
    ("utils.bnb", QUANTIZED_LOADING, "has_4bit_bnb_layers load_and_quantize_model"),
    ("utils.dataclasses", QUANTIZED_LOADING, "BnbQuantizationConfig"),
    ("utils.dataclasses", MEGATRON_LM, "MegatronLMPlugin"),
    (
        "utils.deepspeed",
        DEEPSPEED_INTERNALS,
        "DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper "
        "HfDeepSpeedConfig map_pytorch_optim_to_deepspeed",
    ),
    (
        "utils.fsdp_utils",
        FSDP_INTERNALS,
        "ensure_weights_retied fsdp2_apply_ac fsdp2_canonicalize_names fsdp2_load_full_state_dict "
        "fsdp2_prepare_model fsdp2_switch_optimizer_parameters get_fsdp2_grad_scaler "
        "load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer",
    ),
    (
        "utils.launch",
        LAUNCH_COMMANDS,
        # Accelerate's spelling of SageMaker.
        "prepare_deepspeed_cmd_env prepare_multi_gpu_env prepare_sagemager_args_inputs "
        "prepare_simple_launcher_cmd_env prepare_tpu",
    ),
    (
        "utils.megatron_lm",
        MEGATRON_LM,
        "AbstractTrainStep BertTrainStep GPTTrainStep MegatronEngine MegatronLMDummyDataLoader "
        "MegatronLMDummyScheduler T5TrainStep add_model_config_to_megatron_parser "
        "avg_losses_across_data_parallel_group",
    ),
    ("utils.torch_xla", XLA_INSTALLATION, "install_xla"),
)
"""Module of nbaccel, why it lacks names, and the names."""


def missing_names_of(module_name: str) -> dict[str, Any]:
    """The stand-ins that a module has, by name."""
    return {
        name: missing_name_of(name, part, module_name)
        for module, part, names in _MISSING_NAMES
        if module_name == f"nbaccel.{module}"
        for name in names.split()
    }


def register_stand_in() -> None:
    """Register the stand-in in the shell of this process, if it has one and lacks the magic."""
    manager = getattr(running_shell(), "magics_manager", None)
    # The real magic, where it is loaded already, must not be replaced.
    if manager is not None and "accelerate" not in manager.magics["cell"]:
        manager.register_function(_stand_in_magic, "line_cell", "accelerate")


def _stand_in_magic(line: str, text: str | None = None) -> None:
    """A magic of nbaccel, which `%load_ext nbaccel` brings."""
    name = "%accelerate" if text is None else "%%accelerate"
    raise UserMistake(
        f"{name} is a magic of nbaccel's extension, which `import nbaccel` alone does not load. "
        "Run %load_ext nbaccel in a cell of its own, then this cell again."
    )
