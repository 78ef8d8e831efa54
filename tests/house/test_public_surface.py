"""The public face: what it offers is pinned, resolves, and costs nothing until it is used."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

import nbaccel
from tests.house.source import ROOT

PUBLIC = {
    "Fp8Config",
    "LaunchPicker",
    "Picker",
    "PrecisionPicker",
    "ZeroPicker",
    "configure",
    "Accelerator",
    "AutocastKwargs",
    "CheckpointDamaged",
    "CheckpointFailed",
    "Choice",
    "CollectiveMismatch",
    "CollectiveTimeout",
    "ConfigError",
    "DDPCommunicationHookType",
    "DataLoaderConfiguration",
    "DeepSpeedPlugin",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "FullyShardedDataParallelPlugin",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "Inventory",
    "LaunchTimeout",
    "NbaccelError",
    "PartialState",
    "Plan",
    "Pool",
    "PrecisionMismatch",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RunConfig",
    "Topology",
    "TrainingDiverged",
    "TrainingPlan",
    "WorkerDied",
    "WorkerFailed",
    "__version__",
    "advise",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "init_empty_weights",
    "init_on_device",
    "load_checkpoint_and_dispatch",
    "prepare_pippy",
    "ParallelismConfig",
    "infer_auto_device_map",
    "is_rich_available",
    "load_checkpoint_in_model",
    "debug_launcher",
    "deepspeed_environment",
    "estimate_memory",
    "find_executable_batch_size",
    "fp32_state_dict",
    "inspect_machine",
    "load_fp32_state_dict",
    "notebook_launcher",
    "resolve",
    "save_16bit_weights",
    "set_seed",
    "show_device_map",
    "shutdown",
    "skip_first_batches",
    "synchronize_rng_states",
    "zero_to_fp32",
}
HEAVY = {
    "IPython",
    "deepspeed",
    "ipywidgets",
    "numpy",
    "psutil",
    "pydantic",
    "pynvml",
    "torch",
    "torch_xla",
    "yaml",
}


def test_the_public_names_are_these():
    assert set(nbaccel.__all__) == PUBLIC, "a public change needs a changelog line, too"
    assert nbaccel.__all__ == sorted(PUBLIC), "a name is listed twice, or out of order"


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_a_public_name_resolves_and_is_listed(name):
    assert getattr(nbaccel, name) is not None
    assert name in dir(nbaccel)


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_a_public_name_is_documented(name):
    assert (getattr(nbaccel, name).__doc__ or "").strip(), f"nbaccel.{name} has no docstring"


# Paths below the package that earlier papers, notebooks and messages showed to users.
KNOWN_PATHS = (
    "nbaccel.config.handlers: AutocastKwargs, DataLoaderConfiguration, GradScalerKwargs",
    "nbaccel.deepspeed: ZeroConfig, check_config, deepspeed_table",
    "nbaccel.errors: ConfigError, PlatformUnsupported",
    "nbaccel.optimizer: AcceleratedOptimizer",
    "nbaccel.scheduler: AcceleratedScheduler",
    "nbaccel.train.checkpoint: load_state, save_model, save_state",
    "nbaccel.utils: DataLoaderConfiguration, ProfileKwargs",
)


@pytest.mark.parametrize("known", KNOWN_PATHS)
def test_a_path_that_users_know_still_works(known):
    module, _, names = known.partition(": ")
    assert [n for n in names.split(", ") if not hasattr(import_module(module), n)] == []


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="no attribute 'notebook_lunacher'"):
        nbaccel.notebook_lunacher  # noqa: B018 - the access is the test


def test_importing_the_package_imports_nothing_heavy():
    """The first cell answers at once: torch alone costs seconds."""
    assert not HEAVY & loaded_by("import nbaccel; dir(nbaccel); nbaccel.__version__")


def test_planning_imports_no_torch():
    loaded = loaded_by(
        "import nbaccel\n"
        "nbaccel.resolve(nbaccel.RunConfig(device='cpu')).explain()\n"
        "import nbaccel.config.capabilities, nbaccel.plan.registry\n"
        "for name in ('cpu', 'cuda'): nbaccel.plan.registry.device(name).hazards()"
    )
    assert not {"torch", "IPython", "ipywidgets", "numpy"} & loaded


def test_what_ray_runs_on_a_node_imports_no_torch():
    """Ray's workers have nice 15: on a busy node the import takes minutes."""
    assert "torch" not in loaded_by("import nbaccel.hosts.ray_node")


def test_a_launch_of_one_process_imports_nothing_that_its_function_does_not_use():
    loaded = loaded_by("import os, nbaccel\nassert nbaccel.notebook_launcher(os.getppid, (), 1)")
    assert not {"torch", "numpy", "deepspeed", "accelerate"} & loaded
    assert "nbaccel.deepspeed.strategy.reader" not in loaded


def loaded_by(code):
    """The modules that a fresh process has loaded after running the code."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))
