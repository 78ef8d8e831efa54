"""Commands: ``export``, ``test``, ``estimate-memory``, ``merge-weights``, ``status``, ``env``."""

from __future__ import annotations

import json
import platform
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nbaccel import __version__
from nbaccel.base import atomic, env
from nbaccel.base.errors import ConfigError, WorkerFailed
from nbaccel.base.optional_packages import installed_version
from nbaccel.base.units import format_bytes, format_number, format_seconds
from nbaccel.cli import plain_table, terminal_console
from nbaccel.cli.launch_options import ConfigFile, add_command, own_option

if TYPE_CHECKING:
    from nbaccel.cli.script_making import MadeScript
    from nbaccel.config import RunConfig
    from nbaccel.plan.inventory import Inventory


_CLUSTERS = ("slurm", "ray")
_TARGETS = ("nbaccel", "torchrun", *_CLUSTERS)
_EXPORT_HELP = """\
Write a script out of a notebook, and the command line or job that runs it.

    nbaccel export train.ipynb --to slurm --nproc-per-node 8 --num-nodes 2

The script has the cells with the tag `export`, or else the function of the notebook's call of
notebook_launcher with all that it needs. Cells with the tag `nbaccel-skip` are left out. Settings
are those of the call over what nbaccel config has saved; --config-file, and flags as after
nbaccel launch, come last.
"""


def _export(
    notebook: str = typer.Argument(
        ..., metavar="NOTEBOOK", help="A saved .ipynb file.", show_default=False
    ),
    to: str = own_option("nbaccel", metavar="|".join(_TARGETS), help="What runs the script."),
    output: str | None = own_option(
        *(None, "-o", "--output"),
        metavar="SCRIPT",
        help="The script's file; left out: the notebook's name, here.",
    ),
    function: str = own_option(
        "",
        metavar="NAME",
        help="The launched function, where the notebook launches several.",
        show_default=False,
    ),
    overwrite: bool = own_option(False, "--overwrite", help="Replace what is there."),
    config_file: ConfigFile = None,
    **further_options: Any,
) -> None:
    from nbaccel.cli.script_commands import exported_files
    from nbaccel.cli.script_making import make_script, read_notebook

    if to not in _TARGETS:
        raise ConfigError(
            f"--to must be one of {', '.join(_TARGETS)}: got {to!r}. It says what runs the script. "
            "Leave it out for nbaccel launch."
        )
    notebook_path = Path(notebook)
    # As the name of a script that can be imported: no blanks and dashes.
    stem = re.sub(r"\W", "_", notebook_path.stem)
    script_path = Path(output or f"{'notebook_' * stem[:1].isdecimal()}{stem}.py")
    made_script = make_script(read_notebook(notebook_path), notebook_path.name, function)
    try:
        compile(made_script.text, "script", "exec")
    except SyntaxError as error:
        raise ConfigError(
            f"The script would not run: line {error.lineno}: {error.msg}: got "
            f"{(error.text or '').strip()!r}. Nothing was written. Put what the function needs "
            "into cells with the tag export."
        ) from error
    if to in _CLUSTERS:
        # The job finds its first node itself.
        further_options["master_addr"] = "first-node"
    config = _settings(made_script, config_file, further_options)
    files, command = exported_files(to, config, script_path, made_script.text)
    _write_files(script_path.parent, files, overwrite=overwrite)
    print(f"{script_path}: code cells {', '.join(map(str, made_script.cell_numbers))}")
    for name in [*files][1:]:
        print(script_path.parent / name)
    _tell_unread(made_script, config_file)
    print(f"Run it:\n\n    {command}\n")


def _tell_unread(made_script: MadeScript, config_file: str | None) -> None:
    if made_script.launch is not None and made_script.launch.unread and config_file is None:
        print(
            f"nbaccel: {', '.join(made_script.launch.unread)} of the launch cannot be read without "
            "running the notebook: give flags as after nbaccel launch, or --config-file.",
            file=sys.stderr,
        )


def _settings(made: MadeScript, config_file: str | None, further: dict[str, Any]) -> RunConfig:
    from nbaccel.cli.launch_request import SettingsFile, read_launch_request, read_settings_file
    from nbaccel.config.text_forms import changed_settings

    file = read_settings_file(config_file)
    if made.launch is not None:
        file_config = file.merge({})
        settings = changed_settings(file_config)
        told = made.launch.settings
        # A file that was given for this comes after the notebook, one that was saved before it.
        first, last = (told, settings) if config_file else (settings, told)
        config = type(file_config)().changed(**{**first, **last})
        file = SettingsFile(config=config, name=file.name or "the notebook")
    request = read_launch_request(further, file)
    for note in request.notes:
        print(f"nbaccel: {note}", file=sys.stderr)
    return request.config


def _write_files(folder: Path, files: Mapping[str, str], *, overwrite: bool) -> None:
    already = [str(folder / name) for name in files if (folder / name).exists()]
    if already and not overwrite:
        raise ConfigError(
            f"{', '.join(already)} would be replaced: what is in there may be yours. Give "
            "--overwrite, or another --output."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        atomic.write_text(folder / name, text)


_TEST_HELP = """\
Train for a few seconds on the set-up of a configuration file, or of flags as after nbaccel launch.

Checked are the processes, collectives, seeds, data loaders, the precision, a training and a
checkpoint, each against a known answer. The exit status is 0 if all is well, else 1.
"""
_TEST_TIMEOUT_S = 300.0
_REMEDIES = {
    "processes": "Look at --dry-run of nbaccel launch: how many workers, and on what device.",
    "collectives": "Workers do not reach each other: look for a firewall, and at the network "
    "interfaces (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME; NCCL_DEBUG=INFO says more).",
    "seeds": "Random numbers are drawn elsewhere, too: look for a sitecustomize that draws some.",
    "data loader": "Please report this, with the output of nbaccel env.",
    "precision": "Choose another --mixed-precision, or the backend of FP8 by --fp8.",
    "training": "Try --mixed-precision no and --strategy ddp: what remains is the hardware.",
    "checkpoint": "Look at the free space and the permissions of the temporary folder (TMPDIR).",
}
_AT_START = "Nothing was trained: the workers did not start, or could not prepare the model."


def _test(config_file: ConfigFile = None, **further_options: Any) -> None:
    from nbaccel.cli.launch_request import read_launch_request, read_settings_file

    request = read_launch_request(further_options, read_settings_file(config_file))
    for note in request.notes:
        print(f"nbaccel: {note}", file=sys.stderr)
    with env.applied(dict(request.variables)):
        raise typer.Exit(_run_test(request.config))


def _run_test(config: RunConfig) -> int:
    from nbaccel.cli.launch_request import plan_of_command
    from nbaccel.cli.set_up_checks import SetUpCheckFailed, run_checks
    from nbaccel.launchers import launch_configured
    from nbaccel.plan import registry
    from nbaccel.workers.template import template_for

    if config.timeout is None:
        # A set-up that does not work may hang.
        config = config.changed(timeout=_TEST_TIMEOUT_S)
    plan = plan_of_command(config)
    print(f"{plan.headline()}", flush=True)
    if plan.start_method != "inline":
        template_for(registry.prepare_notebook()).start_ahead()
    start_time = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="nbaccel-test-") as folder:
            arguments = (config, plan.world_size, folder)
            results = launch_configured(run_checks, arguments, config)
    except (WorkerFailed, SetUpCheckFailed) as error:
        raised = getattr(error.failure, "raised", None) if isinstance(error, WorkerFailed) else None
        failed_check = str(raised.message if raised else error).partition(":")[0]
        text = _REMEDIES.get(failed_check, _AT_START)
        what = failed_check if failed_check in _REMEDIES else "the start"
        print(f"{error}\n\nThis set-up does not train: {what} failed. {text}", file=sys.stderr)
        return 1
    for name, found, seconds in results[0]:
        print(f"{name:<12} OK {seconds:6.1f} s  {found}")
    print(f"\nThis set-up trains: all checks passed in {time.monotonic() - start_time:.1f} s.")
    return 0


_ESTIMATE_HELP = (
    "Estimate the memory of a model on this disk: a folder with a transformers config.json (built "
    "without weights), or a file or folder of safetensors (only headers are read). gpt2, llama and "
    "other kinds of models of transformers have their default size. The second table has the "
    "ways to train with Adam; activations depend on the batch and are not in it."
)


def _estimate(
    context: typer.Context,
    model_path: str = typer.Argument(
        ..., metavar="MODEL", help="Folder or file of a model, or gpt2, llama, ..."
    ),
    dtypes: str = typer.Option(
        "float32,bfloat16,int8,int4",
        metavar="WORDS",
        help="Formats of the first table: float32, float16, bfloat16, fp8, int8, int4.",
    ),
    num_gpus: int = typer.Option(1, metavar="N", min=1, help="Devices of each machine."),
    num_nodes: int = typer.Option(1, metavar="N", min=1, help="Machines."),
    mixed_precision: str = typer.Option(
        "no", metavar="WORD", help="no, fp16, bf16 or fp8, of the second table."
    ),
    trust_remote_code: bool = typer.Option(
        False, "--trust-remote-code", help="Run the model's own code, where its folder has some."
    ),
    library_name: str = typer.Option(
        "transformers", metavar="WORD", help="transformers; no other is known."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    # All of them but the context go on; first, when nothing else is local.
    given = {name: value for name, value in locals().items() if name != "context"}
    from nbaccel.cli.memory_tables import print_estimate

    print_estimate(**{**given, "dtypes": [*dtypes.replace(",", " ").split(), *context.args]})


_MERGE_HELP = (
    "Make whole weights of the shards that FSDP's processes wrote (torch.distributed.checkpoint): "
    "of pytorch_model_fsdp_0 in a checkpoint of save_state. All files appear together, or none."
)


def _merge(
    checkpoint_dir: str = typer.Argument(
        ..., metavar="DIR", help="The folder with the shards, or one above it."
    ),
    output_dir: str = typer.Argument(
        ..., metavar="OUT", help="Folder for model.safetensors; made if it is not there."
    ),
    unsafe_serialization: bool = typer.Option(
        False, "--unsafe-serialization", help="Write pytorch_model.bin, a pickle."
    ),
    remove_checkpoint_dir: bool = typer.Option(
        False, "--remove-checkpoint-dir", help="Delete the shards afterwards."
    ),
) -> None:
    from nbaccel.utils.fsdp_utils import merge_fsdp_weights

    start_time = time.monotonic()
    merge_fsdp_weights(
        checkpoint_dir,
        output_dir,
        safe_serialization=not unsafe_serialization,
        remove_checkpoint_dir=remove_checkpoint_dir,
    )
    merged = Path(output_dir, "pytorch_model.bin" if unsafe_serialization else "model.safetensors")
    took = format_seconds(time.monotonic() - start_time)
    print(f"{format_bytes(merged.stat().st_size)} in {merged}: {took}")
    if remove_checkpoint_dir:
        print("The shards have been deleted.")


def _show_runs(
    as_json: bool = typer.Option(False, "--json", help="Print one JSON list."),
    stop: str | None = typer.Option(
        None,
        metavar="ID",
        help="Stop a run, as its Stop button does: its id, or the number of its process.",
    ),
) -> None:
    from nbaccel.output.panel.run_notes import interrupt_run, noted_runs

    if stop is not None:
        note = interrupt_run(stop)
        print(f"nbaccel: {note.name} (process {note.pid}) has been told to stop")
        return
    notes = noted_runs()
    if as_json:
        print(json.dumps([asdict(note) for note in notes], indent=1))
        return
    if not notes:
        print("nbaccel: no run goes on")
        return
    table = plain_table("", "id", "what", "for", "workers", "progress", "loss", "left")
    for note in notes:
        of_words = f" of {note.steps_in_all:,}" if note.steps_in_all else ""
        step = f"step {note.step:,}{of_words}" if note.step else ""
        in_words = f" in this {note.left_of}" if note.left_of else ""
        left_s = None if note.left_s is None else max(0.0, note.left_s - time.time() + note.seen)
        table.add_row(
            note.id,
            note.name,
            format_seconds(time.time() - note.began),
            str(note.num_workers),
            ", ".join(filter(None, (note.epoch, step))),
            format_number(note.loss),
            "-" if left_s is None else f"{format_seconds(left_s)}{in_words}",
        )
    terminal_console().print(table)


Facts = dict[str, dict[str, Any]]  # values by name, in sections

_PACKAGES = (
    *("torch", "numpy", "transformers", "accelerate", "deepspeed", "torchao"),
    *("transformer-engine", "torch-xla", "torch-tpu", "triton", "ray", "safetensors"),
    *("pydantic", "typer", "ipykernel", "ipython", "ipywidgets", "jupyterlab", "notebook"),
)
_SHOWN_PREFIXES = (
    *("NBACCEL_", "ACCELERATE_", "FSDP_", "DEEPSPEED_", "DS_", "NCCL_", "GLOO_", "CUDA_"),
    *("TORCH", "PYTORCH_", "OMP_", "MKL_", "KMP_", "HF_", "TRANSFORMERS_", "XLA_", "TPU_"),
    *("PJRT_", "LIBTPU_", "SLURM_", "RAY_", "PARALLELISM_CONFIG_", "MEGATRON_LM_"),
)
_REPORTED_NAMES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    | {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE", "CONDA_DEFAULT_ENV", "VIRTUAL_ENV"}
)
_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|SIGNATURE", re.IGNORECASE)
_SECRET_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN_VALUE = "(set; not shown)"


def _show_env(
    config_file: str | None = typer.Option(
        None, metavar="FILE", help="Show this configuration file."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print one JSON object."),
) -> None:
    from nbaccel.plan.inspecting import inspect_machine

    inventory = inspect_machine()
    total_text = format_bytes(inventory.host_total_bytes)
    facts: Facts = {
        "nbaccel": {
            "version": __version__,
            "folder": str(Path(__file__).parent.parent),
            "Python": f"{platform.python_version()} ({platform.python_implementation()})",
            "executable": sys.executable,
        },
        "packages": {name: version for name in _PACKAGES if (version := installed_version(name))},
        "machine": {
            "system": platform.platform(),
            "CPU cores": inventory.cpu_cores,
            "CPU": platform.processor() or platform.machine(),
            "memory": f"{total_text}, {format_bytes(inventory.host_available_bytes)} available",
            "shared memory": format_bytes(inventory.shm_bytes) if inventory.shm_bytes else "none",
            "fork": inventory.fork_supported,
            "memfd": inventory.memfd_supported,
        },
        "devices": _device_facts(inventory),
        "variables": shown_variables(env.snapshot()),
        "configuration file": _config_facts(config_file),
    }
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    for section, values in facts.items():
        lines = [f"- {name}: {_line_of(value)}" for name, value in values.items()] or ["- none"]
        print("\n".join([f"## {section}", *lines]))


def _line_of(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner_value}" for name, inner_value in value.items())
    text = str(value)
    return "\n" + textwrap.indent(text.rstrip(), " " * 6) if "\n" in text else text


def _device_facts(inventory: Inventory) -> dict[str, Any]:
    from nbaccel.devices.cuda import driver_version

    facts: dict[str, Any] = {"NVIDIA driver": driver_version() or inventory.gpu_note or "none"}
    for unit in (*inventory.gpus, *inventory.accelerators):
        major, minor = unit.compute_capability
        facts[f"{unit.kind}:{unit.index}"] = (
            f"{unit.name}, {format_bytes(unit.total_bytes)}, {format_bytes(unit.free_bytes)} free"
            + (f", compute capability {major}.{minor}" if major else "")
        )
    if inventory.tpu is not None:
        facts["TPU"] = {
            name: value for name, value in asdict(inventory.tpu).items() if value not in ("", 0, ())
        }
    problems = enumerate(inventory.problems)
    return facts | {f"problem {number}": problem for number, problem in problems}


def shown_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may matter, without secrets."""
    return {
        name: _HIDDEN_VALUE if _SECRET_NAME.search(name) else _SECRET_IN_URL.sub("...", value)
        for name, value in sorted(environment.items())
        if name in _REPORTED_NAMES or name.startswith(_SHOWN_PREFIXES)
    }


def _config_facts(config_file: str | None) -> dict[str, Any]:
    from nbaccel.config import default_config_path

    path = Path(config_file).expanduser() if config_file else default_config_path()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        is_missing = isinstance(error, FileNotFoundError)
        return {"path": str(path), "content": "not there" if is_missing else str(error)}
    lines = []
    for line in text.splitlines():
        name, separator, _ = line.partition(":")
        is_secret = separator and _SECRET_NAME.search(name)
        lines.append(f"{name}: {_HIDDEN_VALUE}" if is_secret else _SECRET_IN_URL.sub("...", line))
    return {"path": str(path), "content": "\n".join(lines)}


def add_others(app: typer.Typer) -> None:
    """Add the subcommands that come after ``launch``."""
    add_command(app, "test", _test, description=_TEST_HELP, short_help="does this set-up train?")
    add_command(
        app,
        "export",
        _export,
        description=_EXPORT_HELP,
        short_help="a script and a job out of a notebook",
        takes_script=False,
    )
    app.command(
        "estimate-memory",
        help=_ESTIMATE_HELP,
        short_help="what a model takes, loaded and trained",
        # Accelerate takes several words after --dtypes.
        context_settings={"allow_extra_args": True},
    )(_estimate)
    short_help = "whole weights out of FSDP's shards"
    app.command("merge-weights", help=_MERGE_HELP, short_help=short_help)(_merge)
    app.command(
        "status",
        help="Show the runs of this user on this machine that go on: of notebooks, scripts and "
        "nbaccel launch. Runs that have ended are not shown.",
        short_help="what trains on this machine, and how far it is",
    )(_show_runs)
    app.command(
        "env",
        help="Show versions, hardware, variables and the default configuration, to paste in a bug "
        "report. Nothing is initialised for it, and values that may be secret are left out.",
        short_help="what to paste in a bug report",
    )(_show_env)
