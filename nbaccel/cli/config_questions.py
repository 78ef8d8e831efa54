"""The questions of ``nbaccel config``, with defaults from what the machine has.

Each answer is checked by the rules of `RunConfig` before the next question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.prompt import Confirm, InvalidResponse, PromptBase

from nbaccel.base.errors import ConfigError, UserMistake
from nbaccel.config import RunConfig
from nbaccel.config.capabilities import DEVICES, FP8_BACKENDS, PRECISIONS, device_row, precision_row
from nbaccel.config.field_rules import FieldCheck, rule_of
from nbaccel.config.given_values import put_at
from nbaccel.plan import registry
from nbaccel.plan.inventory import Inventory
from nbaccel.plan.resolving import resolve

_NO_ANSWER = "-"
"""Stands for "leave it open" where an empty line means the default."""
_Reader = Callable[[str], Any]


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
    try:
        questions.ask_nodes()
        questions.ask_device()
        questions.ask_precision(mixed_precision)
        questions.ask_strategy()
        questions.ask_compilation()
    except EOFError as error:
        raise ConfigError(
            f"The input has ended with questions left; {len(questions.settings)} settings were "
            "answered. Nothing was written. Run nbaccel config in a terminal, or use nbaccel "
            "config default."
        ) from error
    config = RunConfig(**questions.settings)
    try:
        console.print(f"\n[bold]{escape(resolve(config, inventory).headline())}[/bold]\n")
    except UserMistake as mistake:
        # The file may be meant for another machine, so that it is written all the same.
        refusal = escape(str(mistake))
        console.print(f"[yellow]On this machine it would be refused:[/yellow] {refusal}")
    return config


class _Question(PromptBase[Any]):
    """Asks until the answer can be read."""

    # Questions end with a question mark.
    prompt_suffix = " "

    def __init__(self, text: str, *, console: Console, reader: _Reader) -> None:
        super().__init__(text, console=console)
        self._reader = reader

    def process_response(self, value: str) -> Any:
        """The answer as a setting has it."""
        try:
            return self._reader(value.strip())
        except ConfigError as error:
            raise InvalidResponse(f"[red]{escape(str(error))}[/red]") from error


class _YesOrNo(Confirm):
    """Asks for yes or no."""

    prompt_suffix = " "


class _Questions:
    """Asks, and collects the answers."""

    def __init__(self, console: Console, inventory: Inventory) -> None:
        self._console = console
        self._inventory = inventory
        self.settings: dict[str, Any] = {}  # settings of `RunConfig` answered so far

    # ---------------------------------------------------------------------- the groups
    def ask_nodes(self) -> None:
        """How many machines take part, and where they meet."""
        if not self._confirm("Do several machines take part?") or not self._ask_engine():
            return
        for name, question, default in (
            ("num_nodes", "How many machines?", 2),
            ("node_rank", "Which of them is this, from 0?", 0),
            # Until then every address would be refused for the number that is missing.
            ("num_processes", "Workers on each machine?", self._default_count()),
            ("rdzv_backend", "How do they find each other (static, c10d)?", "static"),
            ("master_addr", "Address of machine 0, as the others reach it?", ...),
            ("use_port", "Port there?", 29500),
        ):
            self._setting(name, question, default)

    def ask_device(self) -> None:
        """What workers compute on, and how many there are."""
        there = [
            row.name for row in DEVICES if not registry.device(row.name).refusal(self._inventory)
        ]
        found = resolve(RunConfig(), self._inventory).device
        words = ["auto", *there]
        device = self._choice("device", "What do workers compute on?", words, default=found)
        if "num_processes" not in self.settings:
            self._setting("num_processes", "How many workers?", self._default_count())
        if device_row(found if device == "auto" else device).in_host_memory:
            question = "CPU threads of each worker (- shares the cores)?"
            self._setting("threads_per_process", question, _NO_ANSWER)

    def ask_precision(self, given_precision: str | None) -> None:
        """The number format, and with 8 bits the library."""
        if given_precision is not None:
            self.settings["mixed_precision"] = _checked("mixed_precision", given_precision)
        else:
            words = [row.name for row in PRECISIONS]
            self._choice("mixed_precision", "Mixed precision?", words, default="no")
        if precision_row(self.settings["mixed_precision"]).has_backends:
            backends = ["auto", *(backend.name for backend in FP8_BACKENDS)]
            backend = self._choice("", "Which library computes in FP8?", backends)
            self.settings["fp8"] = {"backend": backend}

    def ask_strategy(self) -> None:
        """How workers train one model together."""
        words = ["auto", "fsdp", "deepspeed"]
        self._choice("strategy", "How is the model divided (auto: every worker holds it)?", words)
        asked = {"fsdp": self._ask_fsdp, "deepspeed": self._ask_deepspeed}
        asked.get(self.settings["strategy"], self._ask_accumulation)()

    def ask_compilation(self) -> None:
        """Whether models are compiled."""
        if not self._confirm("Compile the model with torch.compile?"):
            return
        read_backend = _section_reader("dynamo", "backend")
        backend = self._text("Backend of torch.compile?", "inductor", read_backend)
        modes = ["default", "reduce-overhead", "max-autotune"]
        settings = {"backend": backend, "mode": self._choice("", "Mode?", modes)}
        for name, question in (
            ("dynamic", "Do shapes change from batch to batch?"),
            ("fullgraph", "Refuse a model that is not one graph?"),
            ("use_regional_compilation", "Compile repeated blocks one by one (sooner done)?"),
        ):
            if self._confirm(question):
                settings[name] = True
        self.settings["dynamo"] = settings

    def _ask_engine(self) -> bool:
        """What brings the workers together; whether every machine has a command of its own."""
        words = rule_of(RunConfig.model_fields["engine"]).allowed
        engine = self._choice("engine", "What brings their workers together?", words)
        # Asked of the rules, which know the engines; with "auto" a file of hosts decides.
        if engine != words[0] and self._accepts(hostfile="hosts"):
            self._setting("hostfile", "File of the hosts (- for none)?", _NO_ANSWER)
        return self._accepts(num_nodes=2, num_processes=1, master_addr="10.0.0.1")

    def _accepts(self, **settings: Any) -> bool:
        try:
            RunConfig(**{**self.settings, **settings})
        except ConfigError:
            return False
        return True

    # ------------------------------------------------------------- groups of a strategy
    def _ask_accumulation(self) -> None:
        self._setting("gradient_accumulation_steps", "Batches that make one step?", 1)

    def _ask_deepspeed(self) -> None:
        if self._confirm("Take a JSON file of DeepSpeed?"):
            self._setting("deepspeed", "Its path?", ...)
            # The file says them itself, and would be contradicted.
            self.settings.pop("mixed_precision", None)
            return
        self._setting("zero_stage", "ZeRO stage (0, 1, 2, 3)?", 2)
        self._ask_accumulation()
        document: dict[str, Any] = {}
        clipping = self._text("Clip gradients to which norm (- for none)?", "1.0", _number_or_none)
        if clipping is not None:
            document["gradient_clipping"] = clipping
        if self.settings["zero_stage"] >= 2:
            self._ask_offloading(document, "optimizer", "Where is the optimizer?")
        if self.settings["zero_stage"] == 3:
            self._ask_offloading(document, "param", "Where are the parameters?")
            if self._confirm("Gather 16-bit weights for save_model?", default=True):
                key = "zero_optimization.stage3_gather_16bit_weights_on_model_save"
                put_at(document, key, True)
        if document:
            self.settings["deepspeed"] = document

    def _ask_offloading(self, document: dict[str, Any], part: str, question: str) -> None:
        place = self._choice("", question, ["device", "cpu", "nvme"])
        if place != "device":
            put_at(document, f"zero_optimization.offload_{part}.device", place)
        if place == "nvme":
            folder = self._text("In which folder of the disk?", ..., _any_text)
            put_at(document, f"zero_optimization.offload_{part}.nvme_path", folder)

    def _ask_fsdp(self) -> None:
        settings: dict[str, Any] = {}
        self.settings["fsdp"] = settings
        settings["reshard_after_forward"] = self._confirm(
            "Free gathered weights after the forward (less memory)?", default=True
        )
        settings["cpu_offload"] = self._confirm("Keep shards in host memory?")
        policies = ["transformer_based_wrap", "size_based_wrap", "no_wrap"]
        policy = self._choice("", "What is sharded on its own?", policies)
        settings["auto_wrap_policy"] = policy
        if policy == "transformer_based_wrap":
            question = "Class names of the blocks, with commas (- asks the model)?"
            if names := self._text(question, _NO_ANSWER, _names):
                settings["transformer_cls_names_to_wrap"] = names
        if policy == "size_based_wrap":
            read_size = _section_reader("fsdp", "min_num_params", strategy="fsdp")
            question = "Least parameters of such a part?"
            settings["min_num_params"] = self._text(question, "100000000", read_size)
        forms = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
        settings["state_dict_type"] = self._choice("", "How are checkpoints written?", forms)
        settings["activation_checkpointing"] = self._confirm(
            "Compute activations again in the backward pass (less memory)?"
        )
        self._ask_accumulation()

    # ---------------------------------------------------------------------- one question
    def _setting(self, setting_name: str, question: str, default: Any) -> None:
        """Ask for a setting of `RunConfig`, by its rule."""

        def read(answer: str) -> Any:
            if answer == _NO_ANSWER:
                return None
            return self._consistent(setting_name, _checked(setting_name, answer))

        answer = self._text(question, default, read)
        if answer is not None:
            self.settings[setting_name] = answer

    def _consistent(self, setting_name: str, value: Any) -> Any:
        """The value, unless it contradicts an earlier answer."""
        try:
            RunConfig(**{**self.settings, setting_name: value})
        except ConfigError as error:
            # Others wait for answers that are still to come.
            mistakes = [text for text in error.mistakes if text.startswith(setting_name)]
            if mistakes:
                raise ConfigError(*mistakes) from error
        return value

    def _text(self, question: str, default: Any, reader: _Reader) -> Any:
        # As text, which is what rich shows in parentheses.
        shown_default = default if default is ... else str(default)
        answer = _Question(question, console=self._console, reader=reader)(default=shown_default)
        # An empty line gives the default as it stands, unread.
        is_unread = isinstance(answer, str) and answer == shown_default
        return reader(str(answer)) if is_unread else answer

    def _choice(
        self, setting_name: str, question: str, words: Sequence[str], default: str = ""
    ) -> str:
        """Ask for one of several words; a number stands for the one at its place."""
        shown_words = "  ".join(
            f"[cyan]{number}[/cyan] {word}" for number, word in enumerate(words)
        )
        self._console.print(f"[dim]  {shown_words}[/dim]")
        answer = str(self._text(question, default or words[0], _word_of(words)))
        if setting_name:
            self.settings[setting_name] = answer
        return answer

    def _confirm(self, question: str, *, default: bool = False) -> bool:
        return _YesOrNo.ask(question, console=self._console, default=default)

    def _default_count(self) -> int:
        device = self.settings.get("device", "auto")
        try:
            return resolve(RunConfig(device=device), self._inventory).num_processes
        except UserMistake:  # a device that this machine lacks
            return 1


# ------------------------------------------------------------------------------ readers
def _checked(setting_name: str, answer: Any) -> Any:
    field = RunConfig.model_fields[setting_name]
    annotated: Any = Annotated  # a type checker would want a type that is written out
    return FieldCheck(annotated[(field.annotation, *field.metadata)]).read(setting_name, answer)


def _word_of(words: Sequence[str]) -> _Reader:
    def read(answer: str) -> str:
        if answer.isdecimal() and int(answer) < len(words):
            return words[int(answer)]
        found_words = [word for word in words if word.lower() == answer.lower()]
        if not found_words:
            raise ConfigError(
                f"{answer!r} is none of {', '.join(words)}. Give a word or its number."
            )
        return found_words[0]

    return read


def _section_reader(section_name: str, setting_name: str, **settings: Any) -> _Reader:
    """A reader by the rules of a plugin whose settings are a section of `RunConfig`."""

    def read(answer: str) -> Any:
        config = RunConfig(**{section_name: {setting_name: answer}, **settings})
        return getattr(config, section_name)[setting_name]

    return read


def _number_or_none(answer: str) -> float | None:
    if answer == _NO_ANSWER:
        return None
    try:
        number = float(answer)
    except ValueError:
        number = -1.0
    if not number > 0:
        raise ConfigError(f"{answer!r} is no number above 0. Give for example 1.0, or -.")
    return number


def _names(answer: str) -> list[str]:
    return [] if answer == _NO_ANSWER else [name.strip() for name in answer.split(",")]


def _any_text(answer: str) -> str:
    if not answer:
        raise ConfigError(
            f"{answer!r} names no folder. Nothing could be kept there. Give its path."
        )
    return answer
