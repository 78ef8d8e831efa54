"""Enumerations with the names that Accelerate's users write; not every member is supported."""

from __future__ import annotations

from enum import Enum, EnumMeta


class _Members(EnumMeta):
    """Lets ``"wandb" in LoggerType`` answer; Python itself does from 3.12 on."""

    def __contains__(cls, item: object) -> bool:
        # Members are accepted, too: the class called with a member returns it.
        try:
            cls(item)
        except ValueError:
            return False
        return True


class _Word(str, Enum, metaclass=_Members):
    """A text that is one of a few; ``str`` gives the text itself."""

    def __str__(self) -> str:
        # Python's `str` of a member has the names of the class and of the member.
        return str(self.value)

    @classmethod
    def list(cls) -> list[str]:
        """The texts of all members."""
        return [str(member) for member in cls]


# Not a `_Word`: as in Accelerate, `str` of a member has the class's name.
class DistributedType(str, Enum):
    """How processes train together, by the names that Accelerate's users compare with."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class SageMakerDistributedType(str, Enum):
    """How processes train together on Amazon SageMaker."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class ComputeEnvironment(str, Enum):
    """Where a run's machines are."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class DDPCommunicationHookType(_Word):
    """How DDP compresses the gradients that it sends; ``FP8`` is nbaccel's own."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


class DynamoBackend(_Word):
    """Backends of ``torch.compile``; which of them work depends on what is installed."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class LoggerType(_Word):
    """The trackers that nbaccel knows, by name; ``ALL`` for every one that is installed."""

    ALL = "all"
    JSONL = "jsonl"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"


class PrecisionType(_Word):
    """Number formats for ``mixed_precision``."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class RNGType(_Word):
    """Random generators that ``rng_types`` can name."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class CustomDtype(Enum):
    """Number formats smaller than a byte or without a dtype of torch, for estimates of size."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"
