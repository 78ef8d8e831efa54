"""The options of ``nbaccel launch``: settings of `RunConfig`, its own, and those of its peers.

The peers' are lines of a table. All become one signature, from which typer makes the parser.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from typer.main import get_command

from nbaccel.base import env
from nbaccel.base.public_names import MEGATRON_LM, MIXED_PARALLELISMS
from nbaccel.cli import as_people_read_it

if TYPE_CHECKING:
    from nbaccel.notebook.magic_line import MagicOption


Effect = Literal["setting", "variable", "fp8-setting", "computed", "none", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerOption:
    """One option of another command."""

    flags: tuple[str, ...]  # how it is written, with dashes; underscores are understood, too
    peer: str  # whose it is: ``accelerate launch``, ``torchrun`` or ``deepspeed``
    effect: Effect  # what becomes of it
    target: str = ""  # the setting, the variable, or the setting of FP8
    constant: str = ""  # the value that a switch gives; empty where the option takes one
    reason: str = ""  # why it has no effect or is refused, and what to do instead
    needs: str = ""  # the strategy without which it has no effect
    is_switch: bool = False

    @property
    def flag(self) -> str:
        """Its whole name, as messages write it."""
        return max(self.flags, key=len)

    @property
    def name(self) -> str:
        """Its name as a Python word: that of the parameter that holds it."""
        return self.flag.strip("-").replace("-", "_")


# A heading has the command, the effect, and the strategy that it needs; below it stand flags, with
# `=value` behind those of a switch, and the target or the reason. `*`: see `_FAMILIES`. argparse
# takes beginnings of names: torchrun's guides write --nnode.
_TABLE = """
accelerate launch: setting
    --cpu=cpu                            device
    --multi-gpu=cuda                     device
    --tpu=tpu                            device
    --use-fsdp=fsdp                      strategy
    --num-machines                       num_nodes
    --machine-rank                       node_rank
    --main-process-ip                    master_addr
    --main-process-port                  use_port
    --num-cpu-threads-per-process        threads_per_process
    --deepspeed-config-file              deepspeed
    --deepspeed-hostfile                 hostfile
accelerate launch: computed
    --use-deepspeed=yes                  --strategy deepspeed, at stage 2 where nothing says another
    --gpu-ids                            environment variable CUDA_VISIBLE_DEVICES; all takes all
    --deepspeed-inclusion-filter         as --include
    --deepspeed-exclusion-filter         as --exclude
    --env                                an environment variable of workers: NAME=VALUE
accelerate launch: variable
    --enable-cpu-affinity=true           ACCELERATE_CPU_AFFINITY
    --dynamo-backend                     ACCELERATE_DYNAMO_BACKEND
    --dynamo-mode                        ACCELERATE_DYNAMO_MODE
    --dynamo-use-fullgraph=true          ACCELERATE_DYNAMO_USE_FULLGRAPH
    --dynamo-use-dynamic=true            ACCELERATE_DYNAMO_USE_DYNAMIC
    --dynamo-use-regional-compilation=true  ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION
    --downcast-bf16=true                 ACCELERATE_DOWNCAST_BF16
    --gradient-clipping                  ACCELERATE_GRADIENT_CLIPPING
accelerate launch: variable: deepspeed
    --offload-optimizer-device           ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE
    --offload-param-device               ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE
    --offload-optimizer-nvme-path        ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH
    --offload-param-nvme-path            ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH
    --zero3-init-flag                    ACCELERATE_DEEPSPEED_ZERO3_INIT
    --zero3-save-16bit-model             ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL
    --deepspeed-moe-layer-cls-names      ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES
accelerate launch: variable: fsdp
    --fsdp-*                             FSDP_*
    --fsdp-transformer-layer-cls-to-wrap  FSDP_TRANSFORMER_CLS_TO_WRAP
accelerate launch: fp8-setting
    --fp8-*                              *
    --fp8-format                         fp8_format
    --fp8-use-autocast-during-eval=true  use_autocast_during_eval
accelerate launch: none
    --same-network=yes                   machines meet at the address of the first one
    -t/--tee                             all is shown, and --log-dir writes it to files, too
    --role                               workers have one role, named worker in log_line_prefix_template
    --main-training-function             a script calls its function itself
    --no-tpu-cluster=yes                 TPU pods are never started from here
    --tpu-use-sudo=yes                   no command is run on other hosts
    --deepspeed-multinode-launcher       {launcher}
accelerate launch: refused
    --tpu-cluster=yes                    {pods}
    --vm                                 {pods}
    --aws-access-key-id                  {sagemaker}
    --aws-secret-access-key              {sagemaker}
    --mpirun-hostfile                    MPI is not used. Give the hosts by --hostfile, or start one command on each
    --use-megatron-lm=yes                {megatron}
    --use-parallelism-config=yes         {parallelisms}
    --megatron-lm-*                      {megatron}
    --parallelism-config-*               {parallelisms}
torchrun: setting
    --master-port                        use_port
torchrun: computed
    --nproc-per-node                     --num-processes on each machine; auto, gpu and cpu are known
    --nnode/--nnodes                     --num-nodes; MIN:MAX for nodes that may come and go
    --standalone=yes                     one machine, with a free port: --num-nodes 1
torchrun: none
    -r/--redirects                       --log-dir writes files; --shown-output says which streams are shown beside
    --local-ranks-filter                 --shown-output says which local ranks are shown
    --run-path=yes                       scripts run in the worker's own interpreter always
    --event-log-handler                  there is no log of events
    --logs-specs                         --log-dir writes the files
    --duplicate-stdout-filters           search the files of --log-dir for these lines
    --duplicate-stderr-filters           search the files of --log-dir for these lines
    --local-addr                         the node's address is found by its route to the first node
    --numa-binding                       workers are not bound to cores
    --signals-to-handle                  SIGINT, SIGTERM and SIGHUP end all workers in order
    --shutdown-timeout                   workers are asked, interrupted, and killed within seconds
torchrun: refused
    --virtual-local-rank=yes             {local_rank}
deepspeed: setting
    -H/--hostfile                        hostfile
    -i/--include                         include
    -e/--exclude                         exclude
    --enable-each-rank-log               log_dir
deepspeed: computed
    --num-accelerators/--num-gpus        --num-processes on each machine
deepspeed: none
    --launcher                           {launcher}
    --launcher-args                      {launcher}
    --no-local-rank=yes                  scripts get no --local_rank: LOCAL_RANK has it, as torchrun
    --no-ssh=yes                         without a hostfile no other host is reached
    --no-ssh-check=yes                   hosts are reached, or named in an error
    --force-multi=yes                    the hostfile says which hosts there are
    --save-pid=yes                       workers end with the command
    --bind-cores-to-rank=yes             workers are not bound to cores
    --bind-core-list                     workers are not bound to cores
    --venv-script                        workers are forked from this command's own environment
    --log-level                          set the level in the script
    --ssh-port                           set Port in ~/.ssh/config
deepspeed: refused
    --autotuning                         {autotuning}
"""  # noqa: E501  # a row of a table is a line
_FAMILIES = {
    "--fsdp-*": """
        version offload-params min-num-params sharding-strategy reshard-after-forward
        auto-wrap-policy backward-prefetch state-dict-type forward-prefetch use-orig-params
        cpu-ram-efficient-loading sync-module-states activation-checkpointing
        activation-checkpointing-offload""",
    "--fp8-*": """
        backend margin interval amax-history-len amax-compute-algo override-linear-precision
        opt-level enable-fsdp-float8-all-gather pad-inner-dim""",
    "--megatron-lm-*": """
        tp-degree use-custom-fsdp no-load-optim eod-mask-loss overlap-cpu-optimizer-d2h-h2d
        no-save-optim optimizer-cpu-offload use-precision-aware-optimizer
        decoder-last-pipeline-num-layers pp-degree num-micro-batches sequence-parallelism
        recompute-activations use-distributed-optimizer gradient-clipping recompute-granularity
        recompute-method recompute-num-layers attention-backend expert-model-parallel-size
        context-parallel-size attention-dropout hidden-dropout attention-softmax-in-fp32
        expert-tensor-parallel-size calculate-per-token-loss use-rotary-position-embeddings""",
    "--parallelism-config-*": """
        dp-replicate-size dp-shard-size tp-size cp-size cp-backend cp-comm-strategy sp-size
        sp-backend sp-seq-length sp-seq-length-is-variable sp-attn-implementation""",
}


_REASONS = {
    "pods": "TPU pods are not started from here. Run nbaccel launch on each host of the pod",
    "launcher": "hosts of a hostfile are reached as deepspeed does by default, by pdsh and ssh",
    "sagemaker": "Amazon SageMaker is not supported. Run nbaccel launch in the job's own container",
    "megatron": f"{MEGATRON_LM.what} is not supported. {MEGATRON_LM.instead}",
    "parallelisms": f"{MIXED_PARALLELISMS.what} is not supported. {MIXED_PARALLELISMS.instead}",
    "local_rank": "every worker sees all devices of its machine. Leave it out; LOCAL_RANK is the "
    "number of the worker's device",
    "autotuning": "DeepSpeed's autotuner starts jobs by its own command. Run deepspeed "
    "--autotuning, or nbaccel.advise for a configuration that fits",
}


def _read_table() -> Iterator[PeerOption]:
    peer = effect = needs = ""
    for line in _TABLE.strip().splitlines():
        if not line.startswith(" "):
            peer, effect, needs, *_ = [*line.split(": "), ""]
            continue
        written, _, said = map(str.strip, line.strip().partition("  "))
        has_target = effect in ("setting", "variable", "fp8-setting")
        for name in _FAMILIES.get(written, "").split() or [""]:
            flags, sign, constant = written.replace("*", name).partition("=")
            word = name.replace("-", "_")
            target = said.replace("*", word.upper() if effect == "variable" else word)
            yield PeerOption(
                flags=tuple(flags.split("/")),
                peer=peer,
                effect=cast("Effect", effect),
                target=target if has_target else "",
                constant=constant,
                reason="" if has_target else said.format(**_REASONS),
                needs=needs,
                is_switch=bool(sign),
            )


PEER_OPTIONS: tuple[PeerOption, ...] = tuple(_read_table())


# An option of a command's own, beside those of a launch.
own_option: Any = partial(typer.Option, rich_help_panel="What to run, and what is shown")
ConfigFile = Annotated[
    str | None,
    own_option("--config-file", metavar="FILE", help="YAML with settings.", show_default=False),
]
_COMPLETION_VARIABLE = "_NBACCEL_COMPLETE"  # click's name for the command nbaccel
_SETTINGS_PANEL = "Settings of the run"
# A setting whose option means something else here than in a magic's line.
_OTHER_MEANINGS = {
    "num_processes": "Workers on all machines together, as after accelerate launch; "
    "--nproc-per-node counts those of one machine. Left out, the plan chooses."
}


def add_command(
    app: typer.Typer,
    name: str,
    own_function: Callable[..., None],
    *,
    description: str,
    short_help: str,
    takes_script: bool = True,
) -> None:
    """Add a subcommand that takes the options of a launch beside its own."""

    def add_with_options(parent: typer.Typer) -> None:
        # With a parameter for each option, from which typer makes a parser.
        def with_all_options(**given_options: Any) -> None:
            own_function(**given_options)

        signature = launch_signature(own_function)
        annotations = {name: given.annotation for name, given in signature.parameters.items()}
        vars(with_all_options).update(__signature__=signature)
        with_all_options.__annotations__ = annotations
        parent.command(
            name,
            help=description,
            short_help=short_help,
            context_settings={
                "help_option_names": ["-h", "--help"],
                "allow_interspersed_args": not takes_script,
                "token_normalize_func": lambda word: word.replace("_", "-"),
            },
        )(with_all_options)

    # A shell that completes an option needs to know all of them.
    if env.read(_COMPLETION_VARIABLE):
        add_with_options(app)
        return

    def parse_later(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
        # A command of its own, so that `nbaccel --help` does not read all settings.
        inner_app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        add_with_options(inner_app)
        command = as_people_read_it(get_command(inner_app))
        command.main(args=words or [], prog_name=f"nbaccel {name}")

    app.command(
        name,
        help=description,
        short_help=short_help,
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    )(parse_later)


def launch_signature(own_function: Callable[..., Any]) -> inspect.Signature:
    """The signature of the command: its own parameters, then one for each further option."""
    # Here, so that `nbaccel --help` needs no pydantic.
    from nbaccel.notebook.magic_line import setting_options

    parameters = list(inspect.signature(own_function, eval_str=True).parameters.values())[:-1]
    taken = {
        flag
        for parameter in parameters
        for info in (parameter.default, *getattr(parameter.annotation, "__metadata__", ()))
        for flag in getattr(info, "param_decls", None) or ()
    }
    settings = setting_options()
    taken |= {flag for option in settings for flag in (*option.flags, option.negative)}
    # Keyword-only, so that the parser's order of arguments is that of the function alone.
    parameters += [_setting_parameter(option) for option in settings]
    parameters += [_peer_parameter(one, taken) for one in PEER_OPTIONS if one.flag not in taken]
    return inspect.Signature(parameters)


def _setting_parameter(option: MagicOption) -> inspect.Parameter:
    is_switch = bool(option.negative)
    # Other spellings, which people know from another command.
    peers = [flag for peer in PEER_OPTIONS if option.flag in peer.flags for flag in peer.flags]
    flags = [*(flag for flag in peers if flag != option.flag), *option.flags]
    if is_switch:
        flags[-1] = f"{flags[-1]}/{option.negative}"
    # Long lists of words would leave no room for what the option means.
    metavar = "WORD" if option.choices else option.value
    meaning = _OTHER_MEANINGS.get(option.name, option.meaning)
    choices = f" One of {', '.join(option.choices)}." if option.choices else ""
    return _keyword(
        option.name,
        bool if is_switch else str,
        typer.Option(
            *flags,
            metavar=None if is_switch else metavar,
            help=f"{meaning}{choices}",
            rich_help_panel=_SETTINGS_PANEL,
        ),
    )


def _peer_parameter(option: PeerOption, taken_flags: set[str]) -> inspect.Parameter:
    value_type: type = list[str] if option.name == "env" else str
    return _keyword(
        option.name,
        bool if option.is_switch else value_type,
        typer.Option(
            *(flag for flag in option.flags if flag not in taken_flags),
            metavar=None if option.is_switch else "VALUE",
            # A hundred and fifty of them would hide the settings.
            hidden=True,
        ),
    )


def _keyword(name: str, kind: Any, option: Any) -> inspect.Parameter:
    how = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, how, default=None, annotation=Annotated[kind | None, option])
