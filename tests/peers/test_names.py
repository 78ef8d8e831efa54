"""What code for Accelerate imports can be imported: every public name, from the same place."""

from __future__ import annotations

import enum
import importlib
import inspect
import pickle

import pytest

import nbaccel
from nbaccel import utils
from nbaccel.base.public_names import PIPELINE_PARALLELISM, missing_name_of
from nbaccel.errors import PlatformUnsupported
from tests import needs

accelerate = pytest.importorskip("accelerate")

MODULES = [
    *("big_modeling", "checkpointing", "data_loader", "hooks", "inference", "launchers"),
    *("local_sgd", "logging", "memory_utils", "optimizer", "parallelism_config", "scheduler"),
    *("state", "tracking", "utils.ao", "utils.bnb", "utils.constants", "utils.dataclasses"),
    *("utils.deepspeed", "utils.environment", "utils.fsdp_utils", "utils.imports"),
    *("utils.launch", "utils.megatron_lm", "utils.memory", "utils.modeling", "utils.offload"),
    *("utils.operations", "utils.other", "utils.random", "utils.torch_xla", "utils.tqdm"),
    *("utils.transformer_engine", "utils.versions"),
]
# What a module of theirs defines for itself alone; libraries import none of it.
INTERNAL = {
    "checkpointing": "load_accelerator_state save_accelerator_state",
    "data_loader": "DataLoaderAdapter DataLoaderStateMixin get_sampler",
    "inference": "build_pipeline find_pippy_batch_size generate_device_map pippy_forward",
    "launchers": "test_launch",
    "optimizer": "move_to_device patch_optimizer_step",
    "state": "ThreadLocalSharedDict do_nothing",
    "utils.bnb": """
        get_keys_to_not_convert get_parameter_device get_quantized_model_device_map
        quantize_and_offload_8bit replace_with_bnb_layers
    """,
    "utils.dataclasses": """
        BaseEnum EnumWithContains FP8BackendType add_model_config_to_megatron_parser
        parse_bert_config parse_glm4_moe_config parse_gpt2_config parse_llama_config parse_t5_config
    """,
    "utils.environment": "get_driver_version",
    "utils.fsdp_utils": "fsdp2_prepare_auto_wrap_policy",
    "utils.launch": "env_var_path_add prepare_extend_env_parallelism_config setup_fp8_env",
    "utils.megatron_lm": """
        MegatronLMOptimizerWrapper MegatronLMSchedulerWrapper finish_mpu_init
        gather_across_data_parallel_groups initialize model_provider_func prepare_data_loader
        prepare_model_optimizer_scheduler prepare_optimizer prepare_scheduler
    """,
    "utils.operations": """
        chained_operation gather_tensor_shape is_torch_xpu_tensor verify_operation
    """,
    "utils.other": "has_repeated_blocks is_repeated_blocks",
}
LATER = {
    name
    for name in utils.__all__
    if isinstance(kind := getattr(utils, name), type) and hasattr(kind, "_part")
}


def public(module):
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def test_every_name_of_the_package_itself_and_of_its_utils_is_there():
    missing = public(accelerate) - {"find_executable_batch_size"} - set(nbaccel.__all__)
    assert not missing
    missing = public(importlib.import_module("accelerate.utils")) - set(utils.__all__)
    assert not missing


@pytest.mark.filterwarnings("ignore:memory_utils has been reorganized:FutureWarning")
@pytest.mark.parametrize("name", MODULES)
def test_what_its_modules_define_is_in_the_same_place(name):
    theirs = importlib.import_module(f"accelerate.{name}")
    ours = importlib.import_module(f"nbaccel.{name}")
    defined = {
        member
        for member in public(theirs)
        if str(getattr(getattr(theirs, member), "__module__", "")) == theirs.__name__
    }
    missing = {member for member in defined if not hasattr(ours, member)}
    assert missing == set(INTERNAL.get(name, "").split())


WORDS = [
    *("ComputeEnvironment", "CustomDtype", "DDPCommunicationHookType", "DistributedType"),
    *("DynamoBackend", "LoggerType", "PrecisionType", "RNGType", "SageMakerDistributedType"),
]


@pytest.mark.parametrize("name", WORDS)
def test_words_have_the_same_members(name):
    theirs = getattr(importlib.import_module("accelerate.utils"), name)
    ours = getattr(utils, name)
    values = {member.name: member.value for member in ours}
    assert issubclass(ours, enum.Enum)
    assert {m.name: m.value for m in theirs}.items() <= values.items()
    assert [str(member) for member in theirs] == [str(ours(member.value)) for member in theirs]
    if hasattr(theirs, "list"):
        assert set(theirs.list()) <= set(ours.list())
        assert theirs.list()[0] in ours
        assert "no such thing" not in ours


def test_constants_are_equal():
    theirs = importlib.import_module("accelerate.utils.constants")
    ours = utils.constants
    for name in ours.__all__:
        mine, other = getattr(ours, name), getattr(theirs, name)
        assert (sorted(mine) == sorted(other)) if isinstance(mine, list) else mine == other, name


@pytest.mark.parametrize("name", sorted(LATER))
def test_everything_that_is_still_to_come_says_what_to_do_instead(name):
    assert len(LATER) < 100, "most names are there in earnest"
    with pytest.raises(PlatformUnsupported, match=rf"^{name} belongs to [^.]+: it can be imported"):
        getattr(utils, name)("anything", option=1)


@needs.DEEPSPEED_ROW
@pytest.mark.parametrize("name", ["", *MODULES])
def test_everything_public_can_be_sent_to_workers(name):
    module = importlib.import_module(f"nbaccel.{name}".rstrip("."))
    for public_name in module.__all__:
        value = getattr(module, public_name)
        assert not callable(value) or pickle.loads(pickle.dumps(value)) is value, public_name


def test_what_is_still_to_come_can_be_subclassed_and_says_what_to_do_instead():
    hook = missing_name_of("prepare_pippy", PIPELINE_PARALLELISM, __name__)
    own = type("Own", (hook,), {})
    assert not isinstance(3, hook)
    for part in (own, nbaccel.prepare_pippy):
        with pytest.raises(PlatformUnsupported, match=r"^prepare_pippy belongs to .*split_between"):
            part()
