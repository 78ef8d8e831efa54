"""Options that people already type after ``accelerate launch``, ``torchrun`` and ``deepspeed``.

Each is a row that says what becomes of it here: a setting of `RunConfig`, an environment variable
that training code reads, something computed from several options, nothing (with the reason), or a
refusal. Options that have the name of a setting need no row: the setting is meant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from nbaccel.base.unsupported_names import MEGATRON_LM, MIXED_PARALLELISMS

Effect = Literal["setting", "variable", "fp8-setting", "computed", "none", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerOption:
    """One option of another command.

    Attributes:
        flags: How it is written, with dashes; underscores are understood, too.
        peer: Whose it is: ``accelerate launch``, ``torchrun`` or ``deepspeed``.
        effect: What becomes of it.
        target: The setting, the variable, or the setting of FP8.
        constant: The value that a switch gives; empty where the option takes one.
        reason: Why it has no effect or is refused, and what to do instead.
        needs: The strategy without which it has no effect.
    """

    flags: tuple[str, ...]
    peer: str
    effect: Effect
    target: str = ""
    constant: str = ""
    reason: str = ""
    needs: str = ""
    is_switch: bool = False

    @property
    def flag(self) -> str:
        """Its whole name, as messages write it."""
        return max(self.flags, key=len)

    @property
    def name(self) -> str:
        """Its name as a Python word: that of the parameter that holds it."""
        return self.flag.strip("-").replace("-", "_")

    @property
    def meaning(self) -> str:
        """What it does here, in one line."""
        if self.effect == "setting":
            value = f" {self.constant}" if self.constant else ""
            return f"--{self.target.replace('_', '-')}{value}"
        if self.effect == "variable":
            return f"environment variable {self.target}"
        if self.effect == "fp8-setting":
            return f"{self.target} of --fp8"
        if self.effect == "none":
            return f"no effect: {self.reason}"
        return f"refused: {self.reason}" if self.effect == "refused" else self.reason


_ACCELERATE = "accelerate launch"
_TORCHRUN = "torchrun"
_DEEPSPEED = "deepspeed"


def _row(
    peer: str, effect: Effect, written: str, target: str = "", **more: str | bool
) -> PeerOption:
    """A row; `written` has the flags, and ``=value`` behind those of a switch."""
    text, sign, constant = written.partition("=")
    return PeerOption(
        flags=tuple(text.split("/")),
        peer=peer,
        effect=effect,
        target=target,
        constant=constant,
        is_switch=bool(sign),
        **more,  # type: ignore[arg-type]  # a row is written by keyword
    )


def _rows(
    peer: str, effect: Effect, rows: Iterable[tuple[str, str]], **more: str | bool
) -> tuple[PeerOption, ...]:
    return tuple(_row(peer, effect, written, target, **more) for written, target in rows)


def _with_reasons(
    peer: str, effect: Effect, rows: Iterable[tuple[str, str]]
) -> tuple[PeerOption, ...]:
    return tuple(_row(peer, effect, written, reason=reason) for written, reason in rows)


# ------------------------------------------------------------------ accelerate launch
_MEGATRON_SETTINGS = (
    *("tp-degree", "use-custom-fsdp", "no-load-optim", "eod-mask-loss"),
    *("overlap-cpu-optimizer-d2h-h2d", "no-save-optim", "optimizer-cpu-offload"),
    *("use-precision-aware-optimizer", "decoder-last-pipeline-num-layers", "pp-degree"),
    *("num-micro-batches", "sequence-parallelism", "recompute-activations"),
    *("use-distributed-optimizer", "gradient-clipping", "recompute-granularity"),
    *("recompute-method", "recompute-num-layers", "attention-backend"),
    *("expert-model-parallel-size", "context-parallel-size", "attention-dropout"),
    *("hidden-dropout", "attention-softmax-in-fp32", "expert-tensor-parallel-size"),
    *("calculate-per-token-loss", "use-rotary-position-embeddings"),
)
_PARALLELISM_SETTINGS = (
    *("dp-replicate-size", "dp-shard-size", "tp-size", "cp-size", "cp-backend"),
    *("cp-comm-strategy", "sp-size", "sp-backend", "sp-seq-length"),
    *("sp-seq-length-is-variable", "sp-attn-implementation"),
)
_FSDP_SETTINGS = (
    *("version", "offload-params", "min-num-params", "sharding-strategy"),
    *("reshard-after-forward", "auto-wrap-policy", "backward-prefetch", "state-dict-type"),
    *("forward-prefetch", "use-orig-params", "cpu-ram-efficient-loading", "sync-module-states"),
    *("activation-checkpointing", "activation-checkpointing-offload"),
)
_FP8_SETTINGS = (
    *("backend", "margin", "interval", "amax-history-len", "amax-compute-algo"),
    *("override-linear-precision", "opt-level", "enable-fsdp-float8-all-gather", "pad-inner-dim"),
)
_NO_PODS = "TPU pods are not started from here. Run nbaccel launch on each host of the pod"
_DEFAULT_LAUNCHER = "hosts of a hostfile are reached as deepspeed does by default, by pdsh and ssh"
_NO_SAGEMAKER = "Amazon SageMaker is not supported. Run nbaccel launch in the job's own container"

_OF_ACCELERATE = (
    *_rows(
        _ACCELERATE,
        "setting",
        (
            ("--cpu=cpu", "device"),
            ("--multi-gpu=cuda", "device"),
            ("--tpu=tpu", "device"),
            ("--use-fsdp=fsdp", "strategy"),
            ("--num-machines", "num_nodes"),
            ("--machine-rank", "node_rank"),
            ("--main-process-ip", "master_addr"),
            ("--main-process-port", "use_port"),
            ("--num-cpu-threads-per-process", "threads_per_process"),
            ("--deepspeed-config-file", "deepspeed"),
            ("--deepspeed-hostfile", "hostfile"),
        ),
    ),
    *_with_reasons(
        _ACCELERATE,
        "computed",
        (
            ("--use-deepspeed=yes", "--strategy deepspeed, at stage 2 where nothing says another"),
            ("--gpu-ids", "environment variable CUDA_VISIBLE_DEVICES; all takes all"),
            ("-t/--tee", "--shown-output: what is shown beside being written to --log-dir"),
            ("--deepspeed-inclusion-filter", "as --include"),
            ("--deepspeed-exclusion-filter", "as --exclude"),
        ),
    ),
    *_rows(
        _ACCELERATE,
        "variable",
        (
            ("--enable-cpu-affinity=true", "ACCELERATE_CPU_AFFINITY"),
            ("--dynamo-backend", "ACCELERATE_DYNAMO_BACKEND"),
            ("--dynamo-mode", "ACCELERATE_DYNAMO_MODE"),
            ("--dynamo-use-fullgraph=true", "ACCELERATE_DYNAMO_USE_FULLGRAPH"),
            ("--dynamo-use-dynamic=true", "ACCELERATE_DYNAMO_USE_DYNAMIC"),
            (
                "--dynamo-use-regional-compilation=true",
                "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
            ),
            ("--downcast-bf16=true", "ACCELERATE_DOWNCAST_BF16"),
            ("--gradient-clipping", "ACCELERATE_GRADIENT_CLIPPING"),
        ),
    ),
    *_rows(
        _ACCELERATE,
        "variable",
        (
            ("--offload-optimizer-device", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"),
            ("--offload-param-device", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"),
            ("--offload-optimizer-nvme-path", "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH"),
            ("--offload-param-nvme-path", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH"),
            ("--zero3-init-flag", "ACCELERATE_DEEPSPEED_ZERO3_INIT"),
            ("--zero3-save-16bit-model", "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"),
            ("--deepspeed-moe-layer-cls-names", "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES"),
        ),
        needs="deepspeed",
    ),
    *_rows(
        _ACCELERATE,
        "variable",
        (
            *(
                (f"--fsdp-{setting}", f"FSDP_{setting.replace('-', '_').upper()}")
                for setting in _FSDP_SETTINGS
            ),
            ("--fsdp-transformer-layer-cls-to-wrap", "FSDP_TRANSFORMER_CLS_TO_WRAP"),
        ),
        needs="fsdp",
    ),
    *_rows(
        _ACCELERATE,
        "fp8-setting",
        (
            *((f"--fp8-{setting}", setting.replace("-", "_")) for setting in _FP8_SETTINGS),
            ("--fp8-format", "fp8_format"),
            ("--fp8-use-autocast-during-eval=true", "use_autocast_during_eval"),
        ),
    ),
    *_with_reasons(
        _ACCELERATE,
        "none",
        (
            ("--same-network=yes", "machines meet at the address of the first one"),
            ("--role", "workers have one role, named worker in log_line_prefix_template"),
            ("--main-training-function", "a script calls its function itself"),
            ("--no-tpu-cluster=yes", "TPU pods are never started from here"),
            ("--tpu-use-sudo=yes", "no command is run on other hosts"),
            ("--deepspeed-multinode-launcher", _DEFAULT_LAUNCHER),
        ),
    ),
    _row(_ACCELERATE, "computed", "--env", reason="an environment variable of workers: NAME=VALUE"),
    *_with_reasons(
        _ACCELERATE,
        "refused",
        (
            ("--tpu-cluster=yes", _NO_PODS),
            ("--vm", _NO_PODS),
            ("--aws-access-key-id", _NO_SAGEMAKER),
            ("--aws-secret-access-key", _NO_SAGEMAKER),
            (
                "--mpirun-hostfile",
                "MPI is not used. Give the hosts by --hostfile, or start one command on each",
            ),
            (
                "--use-megatron-lm=yes",
                f"{MEGATRON_LM.what} is not supported. {MEGATRON_LM.instead}",
            ),
            (
                "--use-parallelism-config=yes",
                f"{MIXED_PARALLELISMS.what} is not supported. {MIXED_PARALLELISMS.instead}",
            ),
            *(
                (
                    f"--megatron-lm-{setting}",
                    f"{MEGATRON_LM.what} is not supported. {MEGATRON_LM.instead}",
                )
                for setting in _MEGATRON_SETTINGS
            ),
            *(
                (
                    f"--parallelism-config-{setting}",
                    f"{MIXED_PARALLELISMS.what} is not supported. {MIXED_PARALLELISMS.instead}",
                )
                for setting in _PARALLELISM_SETTINGS
            ),
        ),
    ),
)

# ------------------------------------------------------------------ torchrun
_OF_TORCHRUN = (
    _row(_TORCHRUN, "setting", "--master-port", "use_port"),
    *_with_reasons(
        _TORCHRUN,
        "computed",
        (
            ("--nproc-per-node", "--num-processes on each machine; auto, gpu and cpu are known"),
            # argparse, which torchrun uses, takes beginnings of names: its guides write --nnode.
            ("--nnode/--nnodes", "--num-nodes; MIN:MAX for nodes that may come and go"),
            ("--standalone=yes", "one machine, with a free port: --num-nodes 1"),
            ("-r/--redirects", "--shown-output: streams that go to --log-dir alone"),
            ("--local-ranks-filter", "--shown-output: only these local ranks are shown"),
        ),
    ),
    *_with_reasons(
        _TORCHRUN,
        "none",
        (
            ("--run-path=yes", "scripts run in the worker's own interpreter always"),
            ("--event-log-handler", "there is no log of events"),
            ("--logs-specs", "--log-dir writes the files"),
            ("--duplicate-stdout-filters", "search the files of --log-dir for these lines"),
            ("--duplicate-stderr-filters", "search the files of --log-dir for these lines"),
            ("--local-addr", "the node's address is found by its route to the first node"),
            ("--numa-binding", "workers are not bound to cores"),
            ("--signals-to-handle", "SIGINT, SIGTERM and SIGHUP end all workers in order"),
            ("--shutdown-timeout", "workers are asked, interrupted, and killed within seconds"),
        ),
    ),
    _row(
        _TORCHRUN,
        "refused",
        "--virtual-local-rank=yes",
        reason="every worker sees all devices of its machine. Leave it out; LOCAL_RANK is the "
        "number of the worker's device",
    ),
)

# ------------------------------------------------------------------ deepspeed
_OF_DEEPSPEED = (
    *_rows(
        _DEEPSPEED,
        "setting",
        (
            ("-H/--hostfile", "hostfile"),
            ("-i/--include", "include"),
            ("-e/--exclude", "exclude"),
            ("--enable-each-rank-log", "log_dir"),
        ),
    ),
    *_with_reasons(
        _DEEPSPEED,
        "computed",
        (("--num-accelerators/--num-gpus", "--num-processes on each machine"),),
    ),
    *_with_reasons(
        _DEEPSPEED,
        "none",
        (
            ("--launcher", _DEFAULT_LAUNCHER),
            ("--launcher-args", _DEFAULT_LAUNCHER),
            ("--no-local-rank=yes", "scripts get no --local_rank: LOCAL_RANK has it, as torchrun"),
            ("--no-ssh=yes", "without a hostfile no other host is reached"),
            ("--no-ssh-check=yes", "hosts are reached, or named in an error"),
            ("--force-multi=yes", "the hostfile says which hosts there are"),
            ("--save-pid=yes", "workers end with the command"),
            ("--bind-cores-to-rank=yes", "workers are not bound to cores"),
            ("--bind-core-list", "workers are not bound to cores"),
            ("--venv-script", "workers are forked from this command's own environment"),
            ("--log-level", "set the level in the script"),
            ("--ssh-port", "set Port in ~/.ssh/config"),
        ),
    ),
    _row(
        _DEEPSPEED,
        "refused",
        "--autotuning",
        reason="DeepSpeed's autotuner starts jobs by its own command. Run deepspeed --autotuning, "
        "or nbaccel.advise for a configuration that fits",
    ),
)

PEER_OPTIONS: tuple[PeerOption, ...] = (*_OF_ACCELERATE, *_OF_TORCHRUN, *_OF_DEEPSPEED)
