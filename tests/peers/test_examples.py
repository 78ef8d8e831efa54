"""Accelerate's own examples by feature, with nothing changed but the name in their imports.

They run in one process, through `notebook_launcher`, and under torchrun, with tiny random models
and data. No package brings them, and their text is not ours to copy: `ACCELERATE_EXAMPLES` names a
clone of Accelerate's repository, or its `examples` folder. Without it these tests are skipped;
`test_user_code.py`, code of our own in their manner, always runs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests import needs
from tests.isolation import ROOT
from tests.peers.examples.runner import Outcome, Request, Run

for package in ("accelerate", "transformers", "datasets", "evaluate", "schedulefree"):
    pytest.importorskip(
        package, reason=f"{package} is not installed: pip install '.[accelerate-examples]'"
    )

WHERE = "ACCELERATE_EXAMPLES"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.environ.get(WHERE), reason=f"{WHERE} does not say where Accelerate's examples are"
    ),
]

LANGUAGE_MODEL = (
    "--dataset_name Salesforce/wikitext --dataset_config_name wikitext-2-v1 --block_size 8 "
    "--model_name_or_path HuggingFaceTB/SmolLM-360M --per_device_train_batch_size 16 --seed 1 "
    "--num_train_epochs 2 --checkpointing_steps epoch --with_tracking --report_to tensorboard"
)
GLUE = ["epoch 2: ", "'count': 37"]
PERPLEXITY = ["New best metric: 32.", "best_metric_checkpoint: "]
Case = tuple[str, list[str]]
"""The command line of an example, and what it prints."""

CASES: dict[str, Case] = {
    "tracking": ("--with_tracking --project_dir logs", GLUE),
    "automatic_gradient_accumulation": ("", GLUE),
    "checkpointing": ("--checkpointing_steps epoch --output_dir saved", GLUE),
    "cross_validation": ("", ["epoch 2: ", "Average test metrics from all folds: "]),
    "ddp_comm_hook": ("--ddp_comm_hook fp16", GLUE),
    "early_stopping": ("", GLUE),
    "gradient_accumulation": ("--gradient_accumulation_steps 2", GLUE),
    "gradient_accumulation_for_autoregressive_models": (
        "--gradient_accumulation_steps 2 --per_device_batch_size 50 --with_wandb_tracking",
        ["epoch 2:: eval perplexity: "],
    ),
    "local_sgd": ("--gradient_accumulation_steps 2 --local_sgd_steps 2", GLUE),
    "memory": ("", GLUE),
    "multi_process_metrics": ("", GLUE),
    "profiler": ("--record_shapes --output_trace_dir trace", GLUE),
    "schedule_free": ("", GLUE),
    "deepspeed_with_config_support": (
        f"{LANGUAGE_MODEL} --output_dir language --load_best_model",
        PERPLEXITY,
    ),
    # Without Megatron-LM it trains as the one before; with it: see below.
    "megatron_lm_gpt_pretraining": (f"{LANGUAGE_MODEL} --output_dir megatron", []),
    # It looks at the memory of a GPU: on CPUs it ends in an AttributeError of its own, with
    # Accelerate as well. It gets there after an epoch of training.
    "fsdp_with_peak_mem_tracking": (
        "--model_name_or_path bert-base-cased --with_tracking --output_dir sharded",
        [],
    ),
    # Not in the folder, but what those are made from.
    "nlp_example": ("", GLUE),
    "complete_nlp_example": (
        "--with_tracking --checkpointing_steps epoch --output_dir nlp --project_dir logs_nlp",
        GLUE,
    ),
}
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}}
WARMUP = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}
NEEDS_A_GPU = "'TorchTracemalloc' object has no attribute 'end'"
AGAIN = "checkpointing, resumed"
NAMES = [*CASES, AGAIN]
LIMIT_S = 900  # to end a hang


def folder_of_examples() -> Path:
    folder = Path(os.environ[WHERE])
    return folder / "examples" if (folder / "examples").is_dir() else folder


def scripts(folder: Path, library: str) -> tuple[Run, ...]:
    """All examples as a user would have them, their imports from another library."""
    runs = []
    for name, (arguments, _) in CASES.items():
        file = folder_of_examples() / "by_feature" / f"{name}.py"
        file = file if file.is_file() else folder_of_examples() / file.name
        text = re.sub(
            r"^( *(?:from|import) )accelerate\b",
            rf"\1{library}",
            file.read_text(),
            flags=re.MULTILINE,
        )
        (folder / file.name).write_text(text)
        runs.append(Run(name, str(folder / file.name), tuple(arguments.split())))
    again = Run(
        AGAIN,
        str(folder / "checkpointing.py"),
        ("--resume_from_checkpoint", "saved/epoch_0", "--output_dir", "saved"),
    )
    return (*runs, again)


class Ways:
    """Starts the runners, each in a working directory of its own."""

    def __init__(self, folder: Path) -> None:
        from tests.peers.examples import hub  # transformers, which it imports, takes its time

        self.folder = folder
        hub.build(folder / "hub")

    def start(self, name: str, command: list[str], request: Request) -> subprocess.Popen[bytes]:
        """Start one; what it prints itself is kept in a file."""
        own = self.folder / name
        shutil.copytree(self.folder / "hub", own)
        asked = own / "request.json"
        asked.write_text(json.dumps(asdict(request)))
        environment = {
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(own / "home"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
            "OMP_NUM_THREADS": "1",
            "ACCELERATE_USE_CPU": "true",
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command, "-m", "tests.peers.examples.runner", str(asked)],
                cwd=own,
                env={**os.environ, **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def request(self, way: str, name: str, library: str = "nbaccel", **options: object) -> Request:
        outcomes = self.folder / f"{name} outcomes"
        outcomes.mkdir()
        texts = self.folder / f"{name} scripts"
        texts.mkdir()
        return Request(way, library, scripts(texts, library), str(outcomes), **options)  # type: ignore[arg-type]

    def outcome(self, way: str, name: str, rank: int = 0) -> Outcome:
        file = Outcome.file(self.folder / f"{way} outcomes", name, rank)
        log = self.folder / f"{way}.log"
        assert file.is_file(), f"{way} ended before {name}:\n{log.read_text()[-3000:]}"
        return Outcome(**json.loads(file.read_text()))


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


@pytest.fixture(scope="module")
def ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ways]:
    ways = Ways(tmp_path_factory.mktemp("examples"))
    alone = [
        ways.start(library, [], ways.request("script", library, library))
        for library in ("nbaccel", "accelerate")
    ]
    for process in alone:
        process.wait(LIMIT_S)
    ways.start("launcher", [], ways.request("launcher", "launcher")).wait(LIMIT_S)
    ways.start("torchrun", TORCHRUN, ways.request("script", "torchrun")).wait(LIMIT_S)
    return ways


def check(name: str, outcome: Outcome) -> None:
    if name == "fsdp_with_peak_mem_tracking":
        assert outcome.error is not None
        assert NEEDS_A_GPU in outcome.error
        return
    assert outcome.error is None, outcome.error
    for text in CASES[name.partition(",")[0]][1]:
        assert text in outcome.output
    assert "Traceback" not in outcome.output


def test_all_of_them_are_here() -> None:
    there = {file.stem for file in (folder_of_examples() / "by_feature").glob("*.py")}
    assert there <= set(CASES)


@pytest.mark.parametrize("name", NAMES)
def test_in_one_process_they_print_what_they_print_with_accelerate(ways: Ways, name: str) -> None:
    mine, theirs = (ways.outcome(library, name) for library in ("nbaccel", "accelerate"))
    check(name, mine)
    check(name, theirs)
    assert plain(mine.output) == plain(theirs.output)


def plain(output: str) -> list[str]:
    """The lines of an output that hold no times."""
    lines = output.splitlines()
    return [line for line in lines if re.match(r"epoch|New best|best_|Average|Distr", line)]


@pytest.mark.parametrize("name", NAMES)
def test_through_the_launcher(ways: Ways, name: str) -> None:
    check(name, ways.outcome("launcher", name))


@pytest.mark.parametrize("name", NAMES)
def test_under_torchrun(ways: Ways, name: str) -> None:
    outcomes = [ways.outcome("torchrun", name, rank) for rank in (0, 1)]
    check(name, outcomes[0])
    assert (outcomes[1].error is None) == (outcomes[0].error is None)
    assert "epoch" not in outcomes[1].output


@pytest.fixture
def with_deepspeed(tmp_path: Path) -> Outcome:
    ways = Ways(tmp_path)
    zero = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"}
    sizes = {"train_micro_batch_size_per_gpu": "auto", "optimizer": ADAMW, "scheduler": WARMUP}
    asked = ways.request("launcher", "launcher", deepspeed=zero | sizes)
    name = "deepspeed_with_config_support"
    only = tuple(run for run in asked.runs if run.name == name)
    ways.start("launcher", [], replace(asked, runs=only)).wait(LIMIT_S)
    return ways.outcome("launcher", name)


@needs.ENGINE[0]
@needs.ENGINE[1]
def test_the_one_for_deepspeed_with_deepspeed(with_deepspeed: Outcome, tmp_path: Path) -> None:
    assert with_deepspeed.error is None, with_deepspeed.error
    for text in PERPLEXITY:
        assert text in with_deepspeed.output
    assert list(tmp_path.glob("launcher/language/best_checkpoint/**/*mp_rank_00_model_states.pt"))
