"""Code as users of Accelerate write it runs with nothing changed but the name in its imports.

Each body below is such code. It runs with the real Accelerate, and again with ``accelerate`` in its
``from accelerate... import`` lines replaced by ``nbaccel``; what both return must be equal.
"""

from __future__ import annotations

import inspect
import os
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nbaccel import notebook_launcher

pytestmark = pytest.mark.slow

# --------------------------------------------------------------------- what users have beside


def rows(count: int = 37) -> TensorDataset:
    """Inputs of shape `[count, 8]` and labels 0 to 2."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 8, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def classifier() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))


def numbers(model: nn.Module) -> list[float]:
    return [value.double().sum().item() for value in model.state_dict().values()]


# --------------------------------------------------------------------- their code


def text_classification(folder: Path) -> Any:
    from accelerate import Accelerator, DistributedType
    from accelerate.utils import set_seed
    from transformers import (
        BatchEncoding,
        BertConfig,
        BertForSequenceClassification,
        get_linear_schedule_with_warmup,
    )

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    set_seed(42)

    def collate(samples):
        length = 12 if accelerator.distributed_type == DistributedType.XLA else None
        length = length or max(len(sample["input_ids"]) for sample in samples)
        ids = [s["input_ids"] + [0] * (length - len(s["input_ids"])) for s in samples]
        return BatchEncoding(
            {
                "input_ids": torch.tensor(ids),
                "attention_mask": torch.tensor(ids).ne(0).long(),
                "labels": torch.tensor([s["label"] for s in samples]),
            }
        )

    with accelerator.main_process_first():
        samples = [
            {"input_ids": [(i * k) % 29 + 1 for k in range(1, 5 + i % 7)], "label": i % 2}
            for i in range(42)
        ]
    train_loader = DataLoader(samples[:26], shuffle=True, collate_fn=collate, batch_size=4)
    eval_loader = DataLoader(samples[26:], collate_fn=collate, batch_size=5)
    config = BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    model = BertForSequenceClassification(config).to(accelerator.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = get_linear_schedule_with_warmup(
        optimizer, num_warmup_steps=2, num_training_steps=len(train_loader) * 2 // 2
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    told = []
    for _ in range(2):
        model.train()
        for batch in train_loader:
            batch.to(accelerator.device)
            with accelerator.accumulate(model):
                outputs = model(**batch)
                accelerator.backward(outputs.loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            told.append((outputs.loss.item(), scheduler.get_last_lr()[0]))
        model.eval()
        seen = []
        for batch in eval_loader:
            with torch.no_grad():
                outputs = model(**batch)
            guesses, references = accelerator.gather_for_metrics(
                (outputs.logits.argmax(dim=-1), batch["labels"])
            )
            seen.append((guesses.tolist(), references.tolist()))
        told.append(seen)
    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        folder / "bert",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    again = BertForSequenceClassification.from_pretrained(folder / "bert")
    told += [numbers(again), numbers(accelerator.unwrap_model(model))]
    accelerator.end_training()
    return told


def checkpoints_by_epoch_and_step(folder: Path) -> Any:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.utils import ProjectConfiguration, set_seed

    def training(every, resume_from=None, stop_after=None):
        accelerator = Accelerator(
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
            project_config=ProjectConfiguration(project_dir=str(folder), total_limit=3),
        )
        set_seed(7)
        model = classifier()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        loader = DataLoader(rows(), batch_size=4, shuffle=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.01, epochs=3, steps_per_epoch=len(loader)
        )
        model, optimizer, loader, scheduler = accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        accelerator.register_for_checkpointing(scheduler)
        overall_step, starting_epoch, resume_step, losses = 0, 0, None, []
        if resume_from is not None:
            accelerator.print(f"Resumed from checkpoint: {resume_from}")
            accelerator.load_state(resume_from)
            name = os.path.splitext(os.path.basename(resume_from))[0]
            if "epoch" in name:
                starting_epoch = int(name.replace("epoch_", "")) + 1
            else:
                resume_step = int(name.replace("step_", ""))
                starting_epoch = resume_step // len(loader)
                resume_step -= starting_epoch * len(loader)
                overall_step = starting_epoch * len(loader)
        for epoch in range(starting_epoch, 3):
            loader.set_epoch(epoch)
            active = loader
            if epoch == starting_epoch and resume_step is not None:
                active = accelerator.skip_first_batches(loader, resume_step)
                overall_step += resume_step
            for x, y in active:
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                overall_step += 1
                losses.append((epoch, overall_step, loss.item(), scheduler.get_last_lr()[0]))
                if every == "step" and overall_step % 4 == 0:
                    accelerator.save_state(os.path.join(str(folder), f"step_{overall_step}"))
                if overall_step == stop_after:
                    return losses
            if every == "epoch":
                accelerator.save_state(os.path.join(str(folder), f"epoch_{epoch}"))
        return losses

    unbroken = training("nothing")
    training("step", stop_after=9)
    by_step = training("nothing", resume_from=str(folder / "step_8"))
    training("epoch", stop_after=len(unbroken) // 3 + 2)
    by_epoch = training("nothing", resume_from=str(folder / "epoch_0"))
    assert by_step == unbroken[8:], (by_step[0], unbroken[8])
    assert [told[2:] for told in by_epoch] == [told[2:] for told in unbroken[-len(by_epoch) :]]
    assert len(by_epoch) * 3 == len(unbroken) * 2
    files = sorted(path.name for path in (folder / "step_8").iterdir())
    # Accelerate promises where the samplers are, and does not write it.
    ours = ("sampler", "nbaccel_manifest")
    return unbroken, [name for name in files if not name.startswith(ours)]


def own_tracker(folder: Path) -> Any:
    from accelerate import Accelerator, PartialState
    from accelerate.logging import get_logger
    from accelerate.tracking import GeneralTracker, on_main_process
    from accelerate.utils import LoggerType, ProjectConfiguration

    class ListTracker(GeneralTracker):
        name = "list"
        requires_logging_directory = False

        @on_main_process
        def __init__(self, run_name: str):
            self.run_name = run_name
            self.lines = []

        @property
        def tracker(self):
            return self.lines

        @on_main_process
        def store_init_configuration(self, values):
            self.lines.append(("config", values))

        @on_main_process
        def log(self, values, step=None, **kwargs):
            self.lines.append((step, values, kwargs))

        @on_main_process
        def finish(self):
            self.lines.append("finished")

    PartialState(cpu=True)  # without this Accelerate's tracker would take the process for alone
    tracker = ListTracker("a run")
    accelerator = Accelerator(
        log_with=[tracker, LoggerType.TENSORBOARD],
        project_config=ProjectConfiguration(str(folder), logging_dir=str(folder / "logs")),
    )
    logger = get_logger("tests.user_code", log_level="INFO")
    logger.info(accelerator.state, main_process_only=False)
    if accelerator.is_main_process:
        accelerator.init_trackers("project", config={"lr": 0.1, "batch_size": 4})
    accelerator.wait_for_everyone()
    accelerator.log({"loss": 0.5}, step=1)
    accelerator.log({"loss": 0.25}, step=2, log_kwargs={"list": {"commit": False}})
    for one in accelerator.trackers:  # as scripts of diffusers show images
        if one.name == "tensorboard" and accelerator.is_main_process:
            one.writer.add_images("samples", torch.zeros(1, 3, 4, 4), 2, dataformats="NCHW")
    lines = None
    if accelerator.is_main_process:
        lines = accelerator.get_tracker("list", unwrap=True)
    logger.info("done", main_process_only=True, in_order=False)
    logger.warning_once("only once")
    accelerator.end_training()
    accelerator.wait_for_everyone()
    return lines, sorted(path.name for path in (folder / "logs").iterdir())


def generative_pair(folder: Path) -> Any:
    from datetime import timedelta

    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.utils import InitProcessGroupKwargs, set_seed

    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        kwargs_handlers=[
            DistributedDataParallelKwargs(find_unused_parameters=True),
            InitProcessGroupKwargs(timeout=timedelta(seconds=1800)),
        ],
    )
    set_seed(3, device_specific=True)

    class Generator(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.used, self.unused = nn.Linear(4, 8), nn.Linear(4, 8)

        def forward(self, z):
            return self.used(z)

    generator, critic = Generator(), nn.Linear(8, 1)
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-2, betas=(0.5, 0.9))
    generator, critic, g_optimizer, d_optimizer, loader = accelerator.prepare(
        generator, critic, g_optimizer, d_optimizer, DataLoader(rows(), batch_size=4)
    )
    loss_of = nn.BCEWithLogitsLoss()
    losses = []
    for real, _ in loader:
        with accelerator.accumulate(generator, critic):
            fake = generator(torch.randn(len(real), 4, device=accelerator.device))
            seen = critic(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)])
            with accelerator.autocast():
                d_loss = loss_of(seen, truth)
            accelerator.backward(d_loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(critic.parameters(), 0.5)
            d_optimizer.step()
            d_optimizer.zero_grad()
            g_loss = loss_of(critic(fake), torch.ones(len(real), 1))
            accelerator.backward(g_loss)
            g_optimizer.step()
            g_optimizer.zero_grad()
        losses.append((d_loss.item(), g_loss.item()))
    together = accelerator.gather(torch.tensor(losses)).mean(0).tolist()
    return losses, together, numbers(accelerator.unwrap_model(generator))


def sharded(folder: Path) -> Any:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        state_dict_type="FULL_STATE_DICT",
        reshard_after_forward=True,
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(rows(), batch_size=4)
    )
    losses = []
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x[:, None])[:, 0], y)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
        losses.append(round(float(norm), 4))
    accelerator.save_state(str(folder / "state"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(folder / "state"))
    weights = accelerator.get_state_dict(model)
    shapes = {name: list(value.shape) for name, value in weights.items()}
    return losses, shapes if accelerator.is_main_process else None


BODIES = (text_classification, checkpoints_by_epoch_and_step, own_tracker, generative_pair, sharded)
LIBRARIES = ("accelerate", "nbaccel")

# --------------------------------------------------------------------- with both libraries


def source(body: Callable[..., Any], library: str) -> str:
    """A body's text, with nothing changed but the library that it imports from."""
    text = textwrap.dedent(inspect.getsource(body))
    return re.sub(r"^( *from )accelerate\b", rf"\1{library}", text, flags=re.MULTILINE)


def forget_accelerate() -> None:
    """Let the next body begin anew: Accelerate keeps what the last one asked for."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def run_all(library: str, folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    results = {}
    for body in BODIES:
        if library == "accelerate":
            forget_accelerate()
        own = folder / body.__name__
        own.mkdir(parents=True, exist_ok=True)
        namespace = dict(globals())
        exec(compile(source(body, library), body.__name__, "exec"), namespace)
        try:
            results[body.__name__] = namespace[body.__name__](own)
        except Exception as error:  # its name would be lost on the way home
            raise RuntimeError(f"{body.__name__} failed with {library}") from error
    return results


@pytest.fixture(scope="module", params=[1, 2], ids=["1 process", "2 processes"])
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.setenv("OMP_NUM_THREADS", "1")  # or Accelerate sets the threads, with a warning
        for library in LIBRARIES:
            folder = tmp_path_factory.mktemp(library)
            found[library] = list(
                notebook_launcher(
                    run_all,
                    (library, folder),
                    num_processes=request.param,
                    start_method="template",  # also for one: a fresh process, like a new notebook
                )
            )
        yield found


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_only_the_import_is_changed_and_the_results_are_the_same(results: Any, body: Any) -> None:
    mine, theirs = ([found[body.__name__] for found in results[lib]] for lib in reversed(LIBRARIES))
    assert mine == theirs
