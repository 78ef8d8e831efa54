"""The names of Accelerate that trl, peft, transformers and diffusers import, under nbaccel's paths.

Read from trl 1.16, peft 0.21, transformers 5.23 and diffusers 0.42, with those that their earlier
releases and training scripts use.
"""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

NAMES = {
    "": """
        Accelerator DataLoaderConfiguration DistributedDataParallelKwargs DistributedType
        FullyShardedDataParallelPlugin InitProcessGroupKwargs ParallelismConfig
        PartialState big_modeling cpu_offload cpu_offload_with_hook disk_offload
        dispatch_model hooks infer_auto_device_map init_empty_weights init_on_device
        load_checkpoint_and_dispatch load_checkpoint_in_model logging notebook_launcher
        skip_first_batches state utils
    """,
    "big_modeling": """
        check_device_map
    """,
    "data_loader": """
        BatchSamplerShard DataLoaderDispatcher DataLoaderShard IterableDatasetShard
        SeedableRandomSampler SkipBatchSampler SkipDataLoader prepare_data_loader
        skip_first_batches
    """,
    "hooks": """
        AlignDevicesHook CpuOffload ModelHook SequentialHook UserCpuOffloadHook
        add_hook_to_module attach_align_device_hook attach_align_device_hook_on_blocks
        remove_hook_from_module remove_hook_from_submodules
    """,
    "logging": """
        get_logger
    """,
    "optimizer": """
        AcceleratedOptimizer
    """,
    "parallelism_config": """
        ParallelismConfig
    """,
    "scheduler": """
        AcceleratedScheduler
    """,
    "state": """
        AcceleratorState DistributedType GradientState PartialState is_initialized
    """,
    "tracking": """
        GeneralTracker MLflowTracker TensorBoardTracker WandBTracker filter_trackers
    """,
    "utils": """
        AutocastKwargs CustomDtype DataLoaderConfiguration DeepSpeedEngineWrapper
        DeepSpeedOptimizerWrapper DeepSpeedPlugin DeepSpeedSchedulerWrapper
        DistributedDataParallelKwargs DistributedType DummyOptim DummyScheduler
        FullyShardedDataParallelPlugin GradScalerKwargs GradientAccumulationPlugin
        MODEL_NAME OPTIMIZER_NAME ParallelismConfig PrecisionType ProfileKwargs
        ProjectConfiguration RNGType RNG_STATE_NAME SAFE_WEIGHTS_INDEX_NAME
        SAFE_WEIGHTS_NAME SCHEDULER_NAME TorchDynamoPlugin TorchTensorParallelPlugin
        WEIGHTS_INDEX_NAME WEIGHTS_NAME align_module_device broadcast
        broadcast_object_list calculate_maximum_sizes check_device_map
        check_tied_parameters_in_config compare_versions compute_module_sizes concatenate
        convert_model convert_outputs_to_fp32 extract_model_from_parallel
        extract_submodules_state_dict find_batch_size find_device
        find_executable_batch_size find_tied_parameters gather gather_object
        get_balanced_memory get_data_structure get_max_memory has_offloaded_params
        has_transformer_engine_layers honor_type id_tensor_storage infer_auto_device_map
        is_bf16_available is_compiled_module is_cuda_available is_deepspeed_available
        is_hpu_available is_mlu_available is_mps_available is_musa_available
        is_npu_available is_peft_model is_sdaa_available is_tensorboard_available
        is_torch_version is_torch_xla_available is_wandb_available is_xpu_available
        load_checkpoint_in_model load_fsdp_model load_fsdp_optimizer
        load_offloaded_weights load_state_dict merge_dicts merge_fsdp_weights
        named_module_tensors offload_state_dict offload_weight pad_across_processes
        patch_environment recursively_apply reduce release_memory retie_parameters
        save_fsdp_model save_fsdp_optimizer save_offload_index send_to_device
        set_module_tensor_to_device set_seed synchronize_rng_states tqdm wait_for_everyone
        write_basic_config
    """,
    "utils.constants": """
        FSDP_AUTO_WRAP_POLICY FSDP_SHARDING_STRATEGY MODEL_NAME OPTIMIZER_NAME
        SAFE_WEIGHTS_NAME TORCH_LAUNCH_PARAMS WEIGHTS_NAME
    """,
    "utils.dataclasses": """
        DeepSpeedPlugin DistributedType FullyShardedDataParallelPlugin KwargsHandler
        PrecisionType get_module_class_from_name
    """,
    "utils.deepspeed": """
        DeepSpeedEngineWrapper DeepSpeedSchedulerWrapper DummyOptim DummyScheduler
        HfDeepSpeedConfig get_active_deepspeed_plugin
    """,
    "utils.fsdp_utils": """
        get_parameters_from_modules
    """,
    "utils.imports": """
        is_bf16_available is_bnb_available is_cuda_available is_deepspeed_available
        is_fp8_available is_mlu_available is_mps_available is_npu_available
        is_peft_available is_rich_available is_tensorboard_available
        is_torch_xla_available is_transformers_available is_wandb_available
        is_xpu_available
    """,
    "utils.memory": """
        clear_device_cache release_memory should_reduce_batch_size
    """,
    "utils.modeling": """
        align_module_device check_device_map clean_device_map compute_module_sizes
        compute_module_total_buffer_size convert_file_size_to_int dtype_byte_size
        find_tied_parameters get_balanced_memory get_max_layer_size get_max_memory
        has_offloaded_params id_tensor_storage load_offloaded_weights load_state_dict
        named_module_tensors retie_parameters set_module_tensor_to_device
    """,
    "utils.offload": """
        OffloadedWeightsLoader PrefixedDataset load_offloaded_weight offload_state_dict
        offload_weight
    """,
    "utils.operations": """
        ConvertOutputsToFp32 broadcast broadcast_object_list concatenate
        convert_outputs_to_fp32 convert_to_fp32 find_batch_size find_device gather
        gather_object is_tensor_information listify pad_across_processes recursively_apply
        reduce send_to_device slice_tensors
    """,
    "utils.other": """
        check_os_kernel clean_state_dict_for_safetensors convert_bytes
        extract_model_from_parallel is_compiled_module merge_dicts recursive_getattr save
        wait_for_everyone
    """,
    "utils.random": """
        set_seed synchronize_rng_state
    """,
    "utils.versions": """
        compare_versions is_torch_version
    """,
}
# Names that can be imported and say when they are used why they are not here.
SAYS_WHY = {
    "mixing tensor, context, sequence and data parallelism": """
        ParallelismConfig TorchTensorParallelPlugin
    """,
    "the inside of Accelerate's DeepSpeed": """
        DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper HfDeepSpeedConfig
    """,
    "the inside of Accelerate's FSDP": """
        load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer
    """,
}
# What cannot be imported, and why.
ABSENT = {
    "commands.config": "the command line is another program: nbaccel config",
    "commands.launch": "the command line is another program: nbaccel launch",
    "test_utils": "Accelerate's tests of itself",
}


@pytest.mark.parametrize("module", sorted(NAMES))
def test_what_libraries_import_is_under_the_same_name(module: str) -> None:
    ours = importlib.import_module(f"nbaccel.{module}".rstrip("."))
    theirs = importlib.import_module(f"accelerate.{module}".rstrip("."))
    wanted = NAMES[module].split()
    assert not [name for name in wanted if not hasattr(theirs, name)], "no name of Accelerate 1.15"
    assert not [name for name in wanted if not hasattr(ours, name)]


def test_those_that_are_only_names_say_so() -> None:
    found: dict[str, set[str]] = {}
    for module, names in NAMES.items():
        ours = importlib.import_module(f"nbaccel.{module}".rstrip("."))
        for name in names.split():
            if part := getattr(getattr(ours, name), "_part", None):
                found.setdefault(part.what, set()).add(name)
    assert found == {reason: set(names.split()) for reason, names in SAYS_WHY.items()}


@pytest.mark.parametrize("module", sorted(ABSENT))
def test_what_is_absent_has_a_reason(module: str) -> None:
    assert ABSENT[module]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"nbaccel.{module}")


@pytest.mark.slow
def test_modules_are_attributes_of_the_package_without_an_import_of_their_own() -> None:
    code = "import nbaccel; nbaccel.hooks.AlignDevicesHook, nbaccel.utils.set_seed"
    subprocess.run([sys.executable, "-c", code], check=True)
