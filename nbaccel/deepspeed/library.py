"""DeepSpeed itself, imported when first needed, and its C++ operations.

It compiles an operation when it is first used, silently, for a minute or two, which is said. On a
CPU every engine loads one, and torch needs ninja even where it was built long ago. Errors of all
this come late and name something else; the lock of a killed build makes it wait for ever.

A CPU worker has ``ACCELERATE_USE_CPU``, without which Hugging Face Accelerate would not find the
others. Accelerate 1.15 reads it as "no DeepSpeed", too, and silently trains with DDP: in a worker
the processes communicate by gloo, and a DeepSpeed plugin means DeepSpeed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from packaging.version import InvalidVersion, Version

from nbaccel.base import env, training_libraries
from nbaccel.base.errors import MissingBackend, PlatformUnsupported, UnsafeMoment
from nbaccel.base.log import get_logger, write_notice
from nbaccel.base.optional_packages import install_line, is_installed, require
from nbaccel.base.training_libraries import patch_module

if TYPE_CHECKING:
    from nbaccel.deepspeed.zero_config import ZeroConfig


OLDEST = "0.18.5"  # that the tests have been run with, as `pyproject.toml` declares


@contextlib.contextmanager
def quiet_logger(level: int = logging.CRITICAL + 1) -> Iterator[None]:
    """A block in which DeepSpeed's logger is silent: it logs every configuration it reads."""
    logger = logging.getLogger("DeepSpeed")
    level_before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(level_before)


def _is_no_greeting(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Setting accelerator to CPU.")


def load_module(module: str, *, why: str) -> Any:
    """A module of DeepSpeed."""
    check_version()
    # nbaccel's plan says which device is chosen, with the reason.
    logging.getLogger("DeepSpeed").addFilter(_is_no_greeting)
    loaded_module = require(module, extra="deepspeed", why=why)
    # Only after the import, when the module that compiles operations may have been loaded.
    if BUILDER in sys.modules:
        change_builder(sys.modules[BUILDER])
    return loaded_module


def usual_logging(zero_config: ZeroConfig | None = None) -> contextlib.AbstractContextManager[None]:
    """A block without DeepSpeed's dozen lines, unless the configuration turns them on."""
    settings = {} if zero_config is None else zero_config.to_dict()
    if settings.get("log_level") is not None or settings.get("dump_state"):
        return contextlib.nullcontext()
    return quiet_logger(logging.WARNING)


def begin_comm(zero_config: ZeroConfig | None = None) -> None:
    """Let DeepSpeed take up the process group, without which it cannot even destroy an engine."""
    deepspeed = load_module("deepspeed", why="Training with DeepSpeed")
    # It prints a line for the operation it loads.
    with usual_logging(zero_config), contextlib.redirect_stdout(io.StringIO()):
        deepspeed.init_distributed(dist_init_required=False)


def group_owner() -> Any:
    """The module that ends the process group of this process; None where there is no group."""
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    comm: Any = sys.modules.get("deepspeed.comm.comm")
    # DeepSpeed's function also forgets the groups that it made from the default one.
    return distributed if comm is None or comm.cdb is None else comm


def check_version() -> None:
    """Refuse a DeepSpeed that would fail in the middle of a training, without importing it."""
    if version := older_than(OLDEST):
        raise MissingBackend(
            f"DeepSpeed {version} is installed, which leaves float32 weights out of checkpoints. "
            f'Install a newer one: pip install "deepspeed>={OLDEST}"',
            name="deepspeed",
        )


def older_than(release: str) -> str:
    """The version that is installed, where it is older than this one; empty elsewhere."""
    version = _installed_version()
    try:
        return version if version and Version(version) < Version(release) else ""
    except InvalidVersion:  # of a build from source
        return ""


# Cached: each launch and each plugin asks, and reading metadata takes milliseconds.
@lru_cache(maxsize=1)
def _installed_version() -> str | None:
    """The version that would be imported; None where no metadata says it."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        return None


BUILDER = "deepspeed.ops.op_builder.builder"  # its class compiles every operation


def folder() -> Path:
    """Where torch builds operations, a folder each, by torch's rule (Python and CUDA versions)."""
    if chosen_folder := env.read("TORCH_EXTENSIONS_DIR"):
        return Path(chosen_folder)
    version = require("torch.version", extra="", why="DeepSpeed's C++ parts")
    device_kind = "cpu"
    if version.hip is not None:
        device_kind = f"rocm{version.hip.replace('.', '')}"
    elif version.cuda is not None:
        device_kind = f"cu{version.cuda.replace('.', '')}"
    python_tag = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    extension = require("torch.utils.cpp_extension", extra="", why="DeepSpeed's C++ parts")
    return Path(extension.get_default_build_root()) / f"{python_tag}_{device_kind}"


def is_built(operation_name: str) -> bool:
    """Whether an operation is there, from an earlier use or from DeepSpeed's installation."""
    # Not imported for it: without DeepSpeed loaded only the file tells.
    version_module = sys.modules.get("deepspeed.git_version_info")
    installed_operations = getattr(version_module, "installed_ops", {})
    built_operation = folder() / operation_name / f"{operation_name}.so"
    return bool(installed_operations.get(operation_name)) or built_operation.exists()


def change_builder(builder_module: Any) -> None:
    """Let DeepSpeed's builder look for forgotten locks, and print a line before it compiles."""

    def built(operation: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_built(self.name):
            # Flushed at once, since compiling prints nothing for minutes.
            write_notice(f"nbaccel: DeepSpeed compiles {self.name} now, once: a minute or two\n")
            sys.stderr.flush()
        # Of whom the lock is may not be seen from here: then it waits, and what to do is said.
        try:
            remove_forgotten_locks()
        except UnsafeMoment as error:
            write_notice(f"nbaccel: {error}\n")
        return operation(self, *args, **kwargs)

    _wrap_once(builder_module.OpBuilder, "jit_load", built)


def _wrap_once(changed_class: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Have a method of a class called by another function, which is given it."""
    method = getattr(changed_class, name)
    # `functools.wraps` leaves this mark, which a forked worker inherits with the changed class.
    if not hasattr(method, "__wrapped__"):
        setattr(changed_class, name, training_libraries.hooked(method, wrapper))


_log = get_logger(__name__)
_CPU_OPERATION = "deepspeed_shm_comm"
# On these a lock's holder may run on another machine, whose processes cannot be seen from here.
_SHARED_FILE_SYSTEMS = (
    *("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "fuse.sshfs"),
)


def check_tools(device: str) -> None:
    """Refuse a machine on which every worker would fail when it makes its engine."""
    if not is_installed("deepspeed"):
        raise MissingBackend(
            f"zero_stage needs DeepSpeed, which is not installed for {sys.executable}. Install it: "
            f"{install_line('deepspeed')}",
            name="deepspeed",
        )
    check_version()
    ready_to_build(device)  # for its errors


def ready_to_build(device: str) -> str | None:
    """Refuse a machine on which what every engine loads cannot be built; the PATH to build with."""
    search_path = path_with_ninja()
    if device == "cpu" and _compiler() is None and not is_built(_CPU_OPERATION):
        raise PlatformUnsupported(_no_compiler([_CPU_OPERATION]))
    remove_forgotten_locks()  # engines would wait for these without end
    return search_path


def path_with_ninja() -> str | None:
    """The PATH with which ninja is found, and always the same ninja."""
    # A kernel started as ``venv/bin/python`` lacks ``venv/bin`` on its PATH; the system's ninja, of
    # another version, would build again what a shell has built, and the other way round.
    search_path = env.read("PATH")
    # The one that pip installed for this Python, wherever PATH leads.
    beside_python = (str(Path(sys.executable).parent), sysconfig.get_path("scripts"))
    ninja = shutil.which("ninja", path=os.pathsep.join(beside_python))
    first_ninja = shutil.which("ninja", path=search_path)
    if first_ninja is not None and (ninja is None or Path(first_ninja) == Path(ninja)):
        return search_path
    if ninja is None:
        raise MissingBackend(
            "DeepSpeed needs ninja to load its C++ operations, also those already built: none is "
            f"in PATH ({search_path}) nor beside {sys.executable}. Install it: pip install ninja",
            name="ninja",
        )
    return os.pathsep.join([str(Path(ninja).parent), *filter(None, [search_path])])


def _compiler() -> list[str] | None:
    """The C++ compiler that torch takes, with its options."""
    name, *options = shlex.split(env.read("CXX") or "c++")
    path = shutil.which(name, path=env.read("PATH") or os.defpath)
    return [path, *options] if path else None


def _no_compiler(missing_operations: Sequence[str]) -> str:
    return (
        f"The C++ compiler {(env.read('CXX') or 'c++').split()[0]!r} is not on PATH, and builds "
        f"{', '.join(missing_operations)}. Install it (apt-get install g++), or set CXX."
    )


def remove_forgotten_locks() -> tuple[Path, ...]:
    """Remove locks that a killed process left in the folders of half-built operations."""
    # Whoever builds keeps it open; others wait without end. Met where a kernel was killed.
    forgotten = tuple(filter(_is_forgotten, sorted(folder().glob("*/lock"))))
    for path in forgotten:
        # A warning, since it changes a folder that other environments of this user share.
        name = path.parent.name
        _log.warning("removing %s: the process that was building %s is gone", path, name)
        path.unlink(missing_ok=True)
    return forgotten


def _is_forgotten(lock_path: Path) -> bool:
    """Whether the process that made a lock is gone."""
    # Loading a built operation locks it for a moment: so it must stay the same, without a holder.
    looks = []
    for _ in range(3):
        try:
            looks.append(lock_path.stat())
        except OSError:
            return False  # the build has ended meanwhile
        if (process := _holder_of(lock_path)) is not None:
            _log.info("%s is being built by process %s: DeepSpeed waits", lock_path.parent, process)
            return False
        time.sleep(0.05)  # a build that ends closes its lock first and removes it then
    # The time, too: a file system may give the number of a removed file to the next one.
    is_same = len({(look.st_ino, look.st_ctime_ns) for look in looks}) == 1
    if is_same and not _would_be_seen(lock_path, looks[0].st_uid):
        raise UnsafeMoment(
            f"{lock_path}: no process seen here builds {lock_path.parent.name}, and DeepSpeed "
            f"would wait for ever. If none does elsewhere: rm {shlex.quote(str(lock_path))}"
        )
    return is_same


def _holder_of(lock_path: Path) -> int | None:
    """The process that has a lock open, as the one that builds does until it has finished."""
    path = str(lock_path.resolve())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):  # gone meanwhile, or of another user
            if any(file.path == path for file in process.open_files()):
                return process.pid
    return None


def _would_be_seen(path: Path, owner: int) -> bool:
    """Whether a holder of this file must be a process whose files can be listed."""
    # A lock of another user is held by a process of that user, whose files only root can list.
    if os.geteuid() not in (0, owner):
        return False
    # The longest of the mount points that contain the file is the one it is on.
    kinds = {
        partition.mountpoint: partition.fstype
        for partition in psutil.disk_partitions(all=True)
        if path.resolve().is_relative_to(partition.mountpoint)
    }
    return not kinds.get(max(kinds, key=len, default=""), "").startswith(_SHARED_FILE_SYSTEMS)


# It links against a function of the library: headers alone, without the library, are not enough.
_AIO_PROGRAM = "#include <libaio.h>\nint main() { return io_submit(0, 0, 0); }\n"
_COMPILE_S = 60


def offloads_optimizer(zero_config: ZeroConfig) -> bool:
    """Whether the optimizer steps on the host."""
    section = zero_config.offload_optimizer
    return zero_config.zero_stage > 0 and section is not None and section.device in ("cpu", "nvme")


def own_operation(optimizer_type: str, params: Mapping[str, Any], *, is_offloaded: bool) -> str:
    """The operation of DeepSpeed's own optimizer: ``cpu_adam``; empty where it has none."""
    # DeepSpeed compares names of optimizers in lower case.
    kind = {"adamw": "adam"}.get(optimizer_type.lower(), optimizer_type.lower())
    is_own = kind in ("adam", "lion", "lamb") or (kind == "adagrad" and is_offloaded)
    if not is_own or (kind == "adam" and params.get("torch_adam")):
        return ""
    return f"{'cpu' if is_offloaded and kind != 'lamb' else 'fused'}_{kind}"


def needed_ops(zero_config: ZeroConfig, *, device: str) -> tuple[str, ...]:
    """The C++ parts that a run of this configuration loads."""
    operations = [_CPU_OPERATION] if device == "cpu" else []
    maker = zero_config.optimizer
    if maker is not None and maker.type is not None:
        away = offloads_optimizer(zero_config)
        operations.append(own_operation(maker.type, maker.params or {}, is_offloaded=away))
    sections = (zero_config.offload_optimizer, zero_config.offload_param)
    if any(section is not None and section.device == "nvme" for section in sections):
        operations.append("async_io")
    return tuple(filter(None, operations))


def missing_tools(zero_config: ZeroConfig, *, device: str) -> Iterator[str]:
    """What is missing here to build the parts that are needed, and how to get it."""
    # Some were built when DeepSpeed was installed: only DeepSpeed itself tells which.
    load_module("deepspeed.git_version_info", why="DeepSpeed's C++ parts")
    operations = [one for one in needed_ops(zero_config, device=device) if not is_built(one)]
    command = _compiler()
    text = f"DeepSpeed builds {', '.join(operations)} on first use"
    if operations and command is None:
        yield _no_compiler(operations)
    # DeepSpeed itself only says "hardware/software issue. None".
    if "async_io" in operations and command is not None and not _links_aio(command):
        yield (
            f"The library libaio does not link here. {text} and reads the disk by it. Install it: "
            "apt-get install libaio-dev; or name its folders in CFLAGS (-I) and LDFLAGS (-L)."
        )
    if device == "cuda" and any(name.startswith("fused_") for name in operations):
        # torch has looked for it as the build will, without initialising CUDA.
        extension = require("torch.utils.cpp_extension", extra="", why="DeepSpeed's C++ parts")
        if extension.CUDA_HOME is None:
            yield (
                f"The CUDA toolkit with nvcc is not found: CUDA_HOME is {extension.CUDA_HOME}. "
                f"{text} with it. Install it, or set optimizer.params.torch_adam to true."
            )


def _links_aio(command: list[str]) -> bool:
    flags = [*shlex.split(env.read("CFLAGS") or ""), "-x", "c++", "-", "-o", os.devnull]
    flags += [*shlex.split(env.read("LDFLAGS") or ""), "-laio"]
    program = _AIO_PROGRAM.encode()
    # A compiler that cannot be started, or hangs, links nothing either.
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            [*command, *flags], input=program, capture_output=True, timeout=_COMPILE_S, check=False
        )
        return done.returncode == 0
    return False


# What stands here was seen in DeepSpeed 0.18.5 to 0.19.8 unless its function says otherwise.

_HP_MAPPING = "_hp_mapping"
_Z3_OPTIMIZER = "_z3_optimizer"


def check_fp32_copies(engine: Any) -> None:
    """Refuse an engine that keeps its float32 weights elsewhere than the DeepSpeed known here."""
    # Without them training would end without an error, and without its float32 weights.
    stage = engine.zero_optimization_stage()
    name = _Z3_OPTIMIZER if stage == 3 else _HP_MAPPING
    trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    if not stage or engine.basic_optimizer is None or not trained:
        return
    if not any(hasattr(parameter, name) for parameter in trained):
        version = sys.modules["deepspeed"].__version__
        raise MissingBackend(
            f"DeepSpeed {version} has no private attribute {name} at stage {stage}: float32 "
            "weights could not be read back. Install an older one: pip install "
            '"deepspeed>=0.18.5,<=0.19.8"',
            name="deepspeed",
        )


def has_fp32_fragment(tensor: Any) -> bool:
    """Whether ZeRO 1 or 2 keeps a float32 copy of a parameter, in parts; the same on every rank."""
    return hasattr(tensor, _HP_MAPPING)


def fp32_fragment(tensor: Any) -> Any:
    """This rank's part of a parameter's float32 copy under ZeRO 1 and 2; None without one."""
    return getattr(tensor, _HP_MAPPING, None)


def zero3_optimizer(tensor: Any) -> Any:
    """The ZeRO 3 optimizer that trains a parameter; None where there is only inference."""
    return getattr(tensor, _Z3_OPTIMIZER, None)


ZERO3_MODULE_ATTRIBUTES = frozenset(
    {
        *("_external_params", "_original_parameters", "applied_pre_backward_ref_cnt"),
        *("ds_grads_remaining", "ds_id", "ds_recompute_parameters"),
    }
)
"""Attributes of plain types that ZeRO 3 gives each module; others are of its own types."""


def engine_settings(engine: Any) -> Any:
    """The ``DeepSpeedConfig`` that an engine reads; changes in it take effect."""
    return engine._config


def forget_group_references(module: Any) -> None:
    """Empty the lists of groups in ``deepspeed.utils.groups``, which have no public function."""
    # It is there from 0.19.8 on; in earlier ones the module makes nothing but these lists.
    release = getattr(module, "_release_process_group_references", None)
    if release is not None:
        release()
    else:
        importlib.reload(module)


def removed_keys(reader: Any) -> Mapping[str, str]:
    """Keys that DeepSpeed had, and its sentence on each; from 0.19.7 on, empty before."""
    zero_keys: Mapping[str, str] = getattr(reader, "_REMOVED_ZERO_CONFIG_KEYS", {})
    return {
        **getattr(reader, "_REMOVED_TOP_LEVEL_CONFIG_KEYS", {}),
        **{f"zero_optimization.{name}": text for name, text in zero_keys.items()},
    }


TRANSFORMERS_MODULE = "transformers.integrations.deepspeed"
_HF_CONFIG = "_hf_deepspeed_config_weak_ref"  # transformers 4.30 to 5; unsetting is public


def hf_config_reference() -> Any:
    """The weak reference by which transformers decides that models are built in shards."""
    return getattr(sys.modules.get(TRANSFORMERS_MODULE), _HF_CONFIG, None)


def keep_hf_config_reference(reference: Any) -> None:
    """Put a reference back that `hf_config_reference` gave; nothing where nothing is loaded."""
    if (module := sys.modules.get(TRANSFORMERS_MODULE)) is not None:
        setattr(module, _HF_CONFIG, reference)


# Nothing is imported here: classes are changed when the modules that define them are imported.

_USE_CPU = "ACCELERATE_USE_CPU"


def explain_signal(signal_name: str, functions: Sequence[str]) -> tuple[str, str] | None:
    """The likely cause and the remedy where a worker without shared memory has crashed."""
    # It crashes without a message.
    if signal_name != "SIGSEGV" or "inference_all_reduce" not in functions:
        return None
    return (
        "DeepSpeed adds up through shared memory, and this worker has none: /dev/shm lacks 66 MiB "
        "for each worker, or it was forked after DeepSpeed had run in the notebook.",
        "Enlarge /dev/shm (docker run --shm-size=1g), and leave start_method at 'auto'.",
    )


def enter_worker(device: str) -> None:
    """Prepare a worker for DeepSpeed and Accelerate; cheap where neither is ever imported."""
    patch_module(BUILDER, change_builder)
    if device == "cpu":
        patch_module("accelerate.state", _change_state)
        patch_module("accelerate.utils.dataclasses", _change_plugin)


def _change_state(changed_module: Any) -> None:
    """Let a plugin mean DeepSpeed, although the CPU was asked for."""

    def made(init: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("deepspeed_plugin") is None or not env.flag(_USE_CPU):
            init(self, *args, **kwargs)
            return
        # With `cpu` Accelerate finds the others, over gloo; only without it the plugin is taken.
        if not training_libraries.accelerate_is_set_up():
            handed_on = kwargs.keys() - _OF_ACCELERATOR
            changed_module.PartialState(True, **{name: kwargs[name] for name in handed_on})
        _join_process_group()
        with env.applied({_USE_CPU: None}):
            init(self, *args, **{**kwargs, "cpu": False})

    _wrap_once(changed_module.AcceleratorState, "__init__", made)


_OF_ACCELERATOR = {
    *("mixed_precision", "cpu", "dynamo_plugin", "deepspeed_plugin", "fsdp_plugin"),
    *("torch_tp_plugin", "megatron_lm_plugin", "parallelism_config", "_from_accelerator"),
}
"""Arguments of `AcceleratorState` that are not passed on to the process group."""


def _change_plugin(module: Any) -> None:
    """Let DeepSpeed find the processes once there is a plugin: `zero.Init` may come next."""

    def settled(init: Any, self: Any) -> None:
        init(self)
        if env.flag(_USE_CPU):
            _join_process_group()

    _wrap_once(module.DeepSpeedPlugin, "__post_init__", settled)


def _join_process_group() -> None:
    """Let DeepSpeed take up the process group, if there is one; else it counts one process."""
    if group_owner() is not None:
        begin_comm()
