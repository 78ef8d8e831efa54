"""Names of Accelerate that belong to a part which nbaccel does not have yet.

They can be imported, compared with and subclassed, so that code which only mentions them runs;
using one raises an error that says what is missing and what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from nbaccel.errors import PlatformUnsupported

__all__ = [
    "BIG_MODELS",
    "DEEPSPEED_INTERNALS",
    "FP8",
    "FSDP_INTERNALS",
    "LAUNCH_COMMANDS",
    "MEGATRON",
    "PARALLELISMS",
    "PIPELINES",
    "QUANTIZATION",
    "TPU",
    "Part",
    "later",
]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of Accelerate that this version lacks.

    Attributes:
        what: What it is, after "belongs to".
        instead: What to do without it, as an instruction.
    """

    what: str
    instead: str


BIG_MODELS = Part(
    "spreading one model over devices, host memory and disk",
    "Build the model in a cell outside of the launch: all workers share one copy of its weights. "
    "For a model too big for one device give Accelerator a fsdp_plugin, or a deepspeed_plugin with "
    "stage 3; for inference alone, from_pretrained(device_map=...) of transformers works",
)
PIPELINES = Part(
    "pipeline parallelism for inference",
    "Run the model whole in every process (split_between_processes shares the inputs out), or use "
    "torch.distributed.pipelining in the workers",
)
PARALLELISMS = Part(
    "mixing tensor, context, sequence and data parallelism",
    "Give Accelerator a fsdp_plugin, or a deepspeed_plugin with stage 3, for models too big for "
    "one device",
)
MEGATRON = Part("Megatron-LM", "Give Accelerator a fsdp_plugin or a deepspeed_plugin")
QUANTIZATION = Part(
    "loading models in 8 or 4 bits",
    "Load with from_pretrained(quantization_config=...) of transformers, and train adapters of "
    "peft on it",
)
FP8 = Part(
    "training in fp8 through Accelerator",
    "Use mixed_precision='bf16', or convert the layers yourself with torchao or TransformerEngine "
    "before prepare",
)
DEEPSPEED_INTERNALS = Part(
    "the inside of Accelerate's DeepSpeed",
    "Use prepare of an Accelerator with a deepspeed_plugin; its configuration is "
    "accelerator.deepspeed_config",
)
FSDP_INTERNALS = Part(
    "the inside of Accelerate's FSDP",
    "Use prepare, save_state, load_state and save_model of an Accelerator with a fsdp_plugin",
)
LAUNCH_COMMANDS = Part(
    "Accelerate's command line",
    "Use notebook_launcher, or run the script with torchrun",
)
TPU = Part("training on TPUs", "Train on GPUs or CPUs")


class _Later:
    """Base of the stand-ins."""

    _name: str
    _part: Part

    def __new__(cls, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise PlatformUnsupported(
            f"{cls._name} belongs to {cls._part.what}, which this version of nbaccel does not "
            f"have: it can be imported, not used. {cls._part.instead}."
        )


def later(name: str, part: Part, module: str) -> Any:
    """A stand-in for a class or function of Accelerate.

    Args:
        name: Its name.
        part: What it belongs to.
        module: The module that has it here, as ``__name__``.

    Returns:
        A class. Calling it, or a subclass of it, raises `PlatformUnsupported`.
    """
    doc = f"Of Accelerate; not in this version, which lacks {part.what}. {part.instead}."
    return type(
        name, (_Later,), {"_name": name, "_part": part, "__doc__": doc, "__module__": module}
    )
