"""What is installed and what this machine has: the ``is_..._available`` functions."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from packaging.specifiers import SpecifierSet

from nbaccel.base import env
from nbaccel.base.errors import MissingBackend
from nbaccel.base.optional_packages import install_line, installed_version, is_installed
from nbaccel.base.public_names import name_own

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _is_there(module: str, *distributions: str, versions: str = "") -> bool:
    """Whether pip knows the package in such a version; a folder with its name is none."""
    found = (installed_version(name) for name in distributions or (module,))
    # By default a specifier matches no pre-release: an installed one would count as missing.
    wanted = SpecifierSet(versions, prereleases=True)
    return is_installed(module) and any(version and version in wanted for version in found)


def _finder(*package: str, versions: str = "") -> Callable[[], bool]:
    def is_available() -> bool:
        return _is_there(*package, versions=versions)

    is_available.__doc__ = f"Whether {package[0]} is installed."
    return is_available


_BITSANDBYTES = "bitsandbytes"

is_4bit_bnb_available = _finder(_BITSANDBYTES, versions=">=0.39.0")
is_8bit_bnb_available = _finder(_BITSANDBYTES, versions=">=0.37.2")
is_aim_available = _finder("aim", versions="<4.0.0")
is_amdsmi_available = _finder("amdsmi")
is_boto3_available = _finder("boto3")
is_clearml_available = _finder("clearml")
is_comet_ml_available = _finder("comet_ml", "comet-ml")
is_datasets_available = _finder("datasets")
is_deepspeed_available = _finder("deepspeed")
is_dvclive_available = _finder("dvclive")
is_import_timer_available = _finder("import_timer")
is_lomo_available = _finder("lomo_optim")
is_matplotlib_available = _finder("matplotlib")
is_mlflow_available = _finder("mlflow", "mlflow", "mlflow-skinny")
is_msamp_available = _finder("msamp", "ms-amp")
is_pandas_available = _finder("pandas")
is_peft_available = _finder("peft")
is_pynvml_available = _finder("pynvml", "pynvml", "nvidia-ml-py")
is_pytest_available = _finder("pytest")
is_sagemaker_available = _finder("sagemaker")
is_schedulefree_available = _finder("schedulefree")
is_swanlab_available = _finder("swanlab")
is_timm_available = _finder("timm")
is_torchao_available = _finder("torchao", versions=">=0.6.1")
is_torchdata_available = _finder("torchdata")
is_torchdata_stateful_dataloader_available = _finder("torchdata", versions=">=0.8.0")
is_torchvision_available = _finder("torchvision")
is_tqdm_available = _finder("tqdm")
is_trackio_available = _finder("trackio")
is_transformers_available = _finder("transformers")
is_triton_available = _finder("triton", "triton", "triton-xpu", "pytorch-triton")
is_wandb_available = _finder("wandb")


def is_tensorboard_available() -> bool:
    """Whether tensorboard or tensorboardX is installed."""
    return _is_there("tensorboard") or _is_there("tensorboardX")


def is_transformer_engine_available() -> bool:
    """Whether TransformerEngine is installed, NVIDIA's or Intel's."""
    return _is_there("transformer_engine", "transformer-engine") or _is_there(
        "intel_transformer_engine", "intel-transformer-engine"
    )


def is_bnb_available(min_version: str | None = None) -> bool:
    """Whether bitsandbytes is installed, of that version or newer."""
    return _is_there(_BITSANDBYTES, versions=f">={min_version}" if min_version else "")


def is_bitsandbytes_multi_backend_available() -> bool:
    """Whether the installed bitsandbytes computes on more than CUDA."""
    if not is_bnb_available():
        return False
    return "multi_backend" in getattr(importlib.import_module(_BITSANDBYTES), "features", ())


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Whether numpy is installed, of that version or newer."""
    return _is_there("numpy", versions=f">={min_version}")


def is_rich_available() -> bool:
    """Whether rich is installed and enabled by ``ACCELERATE_ENABLE_RICH``."""
    return _is_there("rich") and bool(env.flag("ACCELERATE_ENABLE_RICH"))


def is_fp8_available() -> bool:
    """Whether a package that computes in fp8 is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def is_transformer_engine_mxfp8_available() -> bool:
    """Whether TransformerEngine is installed and this machine's GPU has block-scaled fp8."""
    if not is_transformer_engine_available() or not is_cuda_available():
        return False
    fp8: Any = importlib.import_module("transformer_engine.pytorch.fp8")
    return bool(fp8.check_mxfp8_support()[0])


def is_megatron_lm_available() -> bool:
    """Whether Megatron-LM is installed and enabled by ``ACCELERATE_USE_MEGATRON_LM``."""
    there = _is_there("megatron", "megatron-core", versions=">=0.8.0")
    return there and bool(env.flag("ACCELERATE_USE_MEGATRON_LM"))


def is_pippy_available() -> bool:
    """Whether torch has ``torch.distributed.pipelining``; every supported one has."""
    return is_installed("torch.distributed.pipelining")


def is_weights_only_available() -> bool:
    """Whether ``torch.load`` can allow single classes; every supported one can."""
    return hasattr(torch.serialization, "add_safe_globals")


def is_torch_distributed_available() -> bool:
    """Whether torch was built with ``torch.distributed``."""
    return torch.distributed.is_available()


def is_xccl_available() -> bool:
    """Whether torch was built with the collectives of Intel GPUs."""
    found = getattr(torch.distributed.distributed_c10d, "is_xccl_available", None)
    return bool(found and found())


def is_cuda_available() -> bool:
    """Whether there is a CUDA device; asked of the driver, so that CUDA is not initialised."""
    # torch's other check initialises CUDA, after which this process could not be forked.
    with env.applied({"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Whether there is an AMD GPU that torch was built for."""
    return torch.version.hip is not None and torch.cuda.is_available()


def is_mps_available(min_version: str = "1.12") -> bool:
    """Whether there is the GPU of a Mac."""
    return torch.backends.mps.is_available() and torch.backends.mps.is_built()


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Whether torch_xla is installed, not off by ``USE_TORCH_XLA=0``, and has the device."""
    if env.flag("USE_TORCH_XLA") is False or not is_installed("torch_xla"):
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    runtime: Any = importlib.import_module("torch_xla.runtime")
    found: str = runtime.device_type()
    return found in (("TPU",) if check_is_tpu else ("GPU", "CUDA"))


def _device(kind: str, package: str) -> Callable[..., bool]:
    def is_available(check_device: bool = False) -> bool:
        return _has_device(kind, package)

    is_available.__doc__ = f"""Whether there is a device that torch calls {kind!r}.

    Args:
        check_device: Taken for compatibility; the device is always looked for.
    """
    return is_available


# Cached, because it imports the device's package.
@functools.cache
def _has_device(kind: str, package: str) -> bool:
    if package and not is_installed(package):
        return False
    try:
        if package:
            importlib.import_module(package)
        return bool(getattr(torch, kind).is_available())
    except Exception:  # a device's package may raise anything without its driver
        return False


is_mlu_available = _device("mlu", "torch_mlu")
is_musa_available = _device("musa", "torch_musa")
is_neuron_available = _device("neuron", "torch_neuronx")
is_npu_available = _device("npu", "torch_npu")
is_sdaa_available = _device("sdaa", "torch_sdaa")
is_xpu_available = _device("xpu", "")


def is_hpu_available(init_hccl: bool = False) -> bool:
    """Whether there is a device that torch calls 'hpu'."""
    return _has_device("hpu", "habana_frameworks.torch")


def is_habana_gaudi1() -> bool:
    """Whether the device is a Gaudi of the first generation, which has no fp16."""
    if not is_hpu_available():
        return False
    found: Any = importlib.import_module("habana_frameworks.torch.utils.experimental")
    device_type = getattr(found, "_get_device_type", None)  # there is no public way to ask
    return device_type is not None and bool(device_type() == found.synDeviceType.synDeviceGaudi)


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Whether this machine's device computes in bf16; CPUs do, and TPUs unless they are ignored."""
    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    if is_cuda_available():
        return bool(torch.cuda.is_bf16_supported())
    for kind, is_there in (("mlu", is_mlu_available), ("xpu", is_xpu_available)):
        if is_there():
            return bool(getattr(torch, kind).is_bf16_supported())
    return not is_mps_available() or bool(torch.backends.mps.is_macos_or_newer(14, 0))


def is_fp16_available() -> bool:
    """Whether this machine's device computes in fp16."""
    return not is_habana_gaudi1()


def torchao_required(func: _Function) -> _Function:
    """Let a function raise where torchao is not installed, before anything of it runs."""
    return _required(func, is_torchao_available, "torchao", "fp8")


def deepspeed_required(func: _Function) -> _Function:
    """Let a function raise where DeepSpeed is not installed, before anything of it runs."""
    return _required(func, is_deepspeed_available, "deepspeed", "deepspeed")


def _required(func: _Function, is_there: Callable[[], bool], package: str, extra: str) -> _Function:
    @functools.wraps(func)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not is_there():
            raise MissingBackend(
                f"{func.__name__} needs {package}, which is not installed. Install it: "
                f"{install_line(extra)}"
            )
        return func(*args, **kwargs)

    return checked  # type: ignore[return-value]


name_own(globals())

# Pickle sends a function by its name: those of the tables would all be `is_available`.
for _name in globals()["__all__"]:
    globals()[_name].__name__ = globals()[_name].__qualname__ = _name
