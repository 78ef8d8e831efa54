"""What ``nbaccel config`` asks: questions, of which each depends on earlier answers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.prompt import Confirm, InvalidResponse, PromptBase

from nbaccel.base.errors import ConfigError, UserMistake
from nbaccel.config import RunConfig, capabilities as rows
from nbaccel.config.field_rules import FieldCheck
from nbaccel.config.given_values import numbers_read, put_at
from nbaccel.plan import registry
from nbaccel.plan.inventory import Inventory
from nbaccel.plan.resolving import resolve

_NO_ANSWER = "-"  # Stands for "leave it open" where an empty line means the default

# The place of the answer (`?`: nowhere), the question, the default (yes and no make it a question
# for these, none one that must be answered), the words to choose from, and when it is asked. An
# answer with a star leaves its place empty.
_TABLE = """
?several                    | Do several machines take part?                       | no
engine                      | What brings their workers together?                  | auto     | {engines} | ?several=yes
hostfile                    | File of the hosts (- for none)?                      | -        |           | has-hosts
num_nodes                   | How many machines?                                   | 2        |           | own-command
node_rank                   | Which of them is this, from 0?                       | 0        |           | own-command
num_processes               | Workers on each machine?                             | {count}  |           | own-command
rdzv_backend                | How do they find each other (static, c10d)?          | static   |           | own-command
master_addr                 | Address of machine 0, as the others reach it?        |          |           | own-command
use_port                    | Port there?                                          | 29500    |           | own-command
device                      | What do workers compute on?                          | {device} | {devices}
num_processes               | How many workers?                                    | {count}  |           | one-command
threads_per_process         | CPU threads of each worker (- shares the cores)?     | -        |           | on-cpu
mixed_precision             | Mixed precision?                                     | no       | {precisions} | no-precision
fp8.backend                 | Which library computes in FP8?                       | auto     | {backends} | in-fp8
strategy                    | How is the model divided (auto: every worker holds it)? | auto  | auto fsdp deepspeed
?document                   | Take a JSON file of DeepSpeed?                       | no       |           | strategy=deepspeed
deepspeed                   | Its path?                                            |          |           | ?document=yes
zero_stage                  | ZeRO stage (0, 1, 2, 3)?                             | 2        |           | ?document=no
fsdp.reshard_after_forward  | Free gathered weights after the forward (less memory)? | yes    |           | strategy=fsdp
fsdp.cpu_offload            | Keep shards in host memory?                          | no       |           | strategy=fsdp
fsdp.auto_wrap_policy       | What is sharded on its own?                          | transformer_based_wrap | transformer_based_wrap size_based_wrap no_wrap | strategy=fsdp
fsdp.transformer_cls_names_to_wrap | Class names of the blocks, with commas (- asks the model)? | - | | fsdp.auto_wrap_policy=transformer_based_wrap
fsdp.min_num_params         | Least parameters of such a part?                     | 100000000 |          | fsdp.auto_wrap_policy=size_based_wrap
fsdp.state_dict_type        | How are checkpoints written?                         | SHARDED_STATE_DICT | SHARDED_STATE_DICT FULL_STATE_DICT | strategy=fsdp
fsdp.activation_checkpointing | Compute activations again in the backward pass (less memory)? | no | | strategy=fsdp
gradient_accumulation_steps | Batches that make one step?                          | 1        |           | no-document
deepspeed.gradient_clipping | Clip gradients to which norm (- for none)?           | 1.0      |           | ?document=no
deepspeed.zero_optimization.offload_optimizer.device    | Where is the optimizer?      | device* | device* cpu nvme | shards-gradients
deepspeed.zero_optimization.offload_optimizer.nvme_path | In which folder of the disk? | | | deepspeed.zero_optimization.offload_optimizer.device=nvme
deepspeed.zero_optimization.offload_param.device        | Where are the parameters?    | device* | device* cpu nvme | zero_stage=3
deepspeed.zero_optimization.offload_param.nvme_path     | In which folder of the disk? | | | deepspeed.zero_optimization.offload_param.device=nvme
deepspeed.zero_optimization.stage3_gather_16bit_weights_on_model_save | Gather 16-bit weights for save_model? | yes | | zero_stage=3
?compile                    | Compile the model with torch.compile?                | no
dynamo.backend              | Backend of torch.compile?                            | inductor |           | ?compile=yes
dynamo.mode                 | Mode?                                                | default  | default reduce-overhead max-autotune | ?compile=yes
dynamo.dynamic              | Do shapes change from batch to batch?                | no*      |           | ?compile=yes
dynamo.fullgraph            | Refuse a model that is not one graph?                | no*      |           | ?compile=yes
dynamo.use_regional_compilation | Compile repeated blocks one by one (sooner done)? | no*     |           | ?compile=yes
"""  # noqa: E501  # a row of a table is a line


def ask_config(
    console: Console, inventory: Inventory, *, mixed_precision: str | None = None
) -> RunConfig:
    """Ask about a run."""
    names = [unit.name or unit.kind for unit in registry.usable_units(inventory)]
    units = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
    reason = f" ({inventory.gpu_note})" if inventory.gpu_note else ""
    parts = [f"{inventory.cpu_cores} CPU cores", *(units or [f"no accelerator{reason}"])]
    console.print(Panel(", ".join(parts), title="This machine", title_align="left"))
    console.print("Enter takes the answer in parentheses; Ctrl-C leaves and writes nothing.\n")
    questions = _Questions(console, inventory)
    if mixed_precision is not None:
        questions.answers["mixed_precision"] = questions.read("mixed_precision", mixed_precision)
    try:
        for line in _TABLE.strip().splitlines():
            questions.ask(*(column.strip() for column in line.split("|")))
    except EOFError as error:
        raise ConfigError(
            f"The input has ended with questions left; {len(questions.settings())} settings were "
            "answered. Nothing was written. Run nbaccel config in a terminal, or use nbaccel "
            "config default."
        ) from error
    config = RunConfig(**questions.settings())
    try:
        console.print(f"\n[bold]{escape(resolve(config, inventory).headline())}[/bold]\n")
    except UserMistake as mistake:
        # The file may be meant for another machine, so that it is written all the same.
        refusal = escape(str(mistake))
        console.print(f"[yellow]On this machine it would be refused:[/yellow] {refusal}")
    return config


class _YesOrNo(Confirm):
    prompt_suffix = " "  # questions end with a question mark


class _Prompt(PromptBase[Any]):
    prompt_suffix = " "

    def __init__(self, text: str, read: Any, *, console: Console) -> None:
        super().__init__(text, console=console)
        self._read = read

    def process_response(self, value: str) -> Any:
        """The answer as a setting has it."""
        try:
            return self._read(value.strip())
        except ConfigError as error:
            raise InvalidResponse(f"[red]{escape(str(error))}[/red]") from error


class _Questions:
    def __init__(self, console: Console, inventory: Inventory) -> None:
        self._console = console
        self._inventory = inventory
        self._device = resolve(RunConfig(), inventory).device
        self.answers: dict[str, Any] = {}  # by place

    def settings(self, **more: Any) -> dict[str, Any]:
        """Settings of `RunConfig` answered so far."""
        settings: dict[str, Any] = {}
        for place, answer in {**self.answers, **more}.items():
            if answer is not None and not place.startswith("?") and not str(answer).endswith("*"):
                put_at(settings, place, answer)
        if self.answers.get("?document"):
            # The file says it itself, and would be contradicted.
            settings.pop("mixed_precision", None)
        return settings

    def ask(self, place: str, text: str, default: str, words: str = "", when: str = "") -> None:
        """Ask one of the questions, unless earlier answers make it one of nothing."""
        if when and not self._holds(when):
            return
        default = default.format(device=self._device, count=self._default_count())
        if default.rstrip("*") in ("yes", "no") and not words:
            is_on = _YesOrNo.ask(text, console=self._console, default=default == "yes")
            self.answers[place] = is_on if is_on or default != "no*" else None
            return
        devices_here = [
            row.name
            for row in rows.DEVICES
            if not registry.device(row.name).refusal(self._inventory)
        ]
        choices = words.format(
            engines=" ".join(["auto", *(row.name for row in rows.ENGINES)]),
            devices=" ".join(["auto", *devices_here]),
            precisions=" ".join(row.name for row in rows.PRECISIONS),
            backends=" ".join(["auto", *(row.name for row in rows.FP8_BACKENDS)]),
        ).split()
        if choices:
            shown = "  ".join(f"[cyan]{n}[/cyan] {word}" for n, word in enumerate(choices))
            self._console.print(f"[dim]  {shown.replace('*', '')}[/dim]")
        prompt = _Prompt(text, partial(self.read, place, choices=choices), console=self._console)
        answer = prompt(default=default.rstrip("*") or ...)
        # An empty line gives the default as it stands, unread.
        is_unread = isinstance(answer, str) and answer == default.rstrip("*")
        self.answers[place] = self.read(place, str(answer), choices) if is_unread else answer

    def read(self, place: str, answer: str, choices: Sequence[str] = ()) -> Any:
        """The answer as a setting has it, unless it contradicts an earlier one."""
        if answer == _NO_ANSWER:
            return None
        if choices:
            return _word_of(choices, answer)
        setting_name, _, inner_place = place.partition(".")
        value: Any = answer
        if not inner_place:
            field = RunConfig.model_fields[setting_name]
            annotated: Any = Annotated  # a type checker would want a type that is written out
            check = FieldCheck(annotated[(field.annotation, *field.metadata)])
            value = check.read(setting_name, answer)
        elif place.endswith(("gradient_clipping", "min_num_params")):
            value = numbers_read(answer)
            if not (isinstance(value, (int, float)) and value > 0):
                raise ConfigError(f"{answer!r} is no number above 0. Give for example 1.0.")
        elif not answer:
            raise ConfigError(f"{answer!r} says nothing, and there is no default. Give an answer.")
        try:
            RunConfig(**self.settings(**{place: value}))
        except ConfigError as error:
            # Others wait for answers that are still to come.
            mistakes = [text for text in error.mistakes if text.startswith(setting_name)]
            if mistakes:
                raise ConfigError(*mistakes) from error
        return value

    def _holds(self, condition: str) -> bool:
        answers = self.answers
        place, sign, wanted = condition.partition("=")
        if sign:
            value = answers.get(place)
            return wanted == (("no", "yes")[value] if isinstance(value, bool) else str(value))
        device = answers.get("device", "auto")
        engine = answers.get("engine", "auto")
        row = rows.ENGINES[0] if engine == "auto" else rows.engine_row(engine)
        # With "auto" a file of hosts decides.
        own_command = bool(answers["?several"]) and not row.runs_on_hosts
        told: dict[str, bool] = {
            "has-hosts": bool(row.setting),
            "own-command": own_command,
            "one-command": not own_command,
            "on-cpu": rows.device_row(self._device if device == "auto" else device).in_host_memory,
            "no-precision": "mixed_precision" not in answers,
            "in-fp8": rows.precision_row(answers.get("mixed_precision", "no")).has_backends,
            "no-document": not answers.get("?document"),
            "shards-gradients": answers.get("zero_stage", 0) >= 2,
        }
        return told[condition]

    def _default_count(self) -> int:
        device = self.answers.get("device", "auto")
        try:
            return resolve(RunConfig(device=device), self._inventory).num_processes
        except UserMistake:  # a device that this machine lacks
            return 1


def _word_of(words: Sequence[str], answer: str) -> str:
    if answer.isdecimal() and int(answer) < len(words):
        return words[int(answer)]
    for word in words:
        if word.rstrip("*").lower() == answer.lower():
            return word
    raise ConfigError(
        f"{answer!r} is none of {', '.join(words).replace('*', '')}. Give a word or its number."
    )
