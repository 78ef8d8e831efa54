"""The code that people have, unchanged, as a person sees it train: curves, speeds, nothing pink."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.conftest import Open
from tests.browser.page import NotebookPage

pytestmark = [pytest.mark.slow, pytest.mark.browser]

SETUP = """\
import torch
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler
from nbaccel import Accelerator, notebook_launcher

model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=200, n_positions=64))
ids = torch.arange(32) % 50
tokens = [{"input_ids": ids, "labels": ids} for _ in range(480)]"""
# As the Hugging Face course writes it.
COURSE = """\
def training_function(model):
    train_dataloader = DataLoader(tokens, shuffle=True, batch_size=8)
    optimizer = AdamW(model.parameters(), lr=3e-4)
    accelerator = Accelerator()
    train_dataloader, model, optimizer = accelerator.prepare(train_dataloader, model, optimizer)
    num_epochs = 4
    num_training_steps = num_epochs * len(train_dataloader)
    lr_scheduler = get_scheduler(
        "linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=num_training_steps
    )
    model.train()
    for epoch in range(num_epochs):
        for batch in train_dataloader:
            outputs = model(**batch)
            loss = outputs.loss
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()

notebook_launcher(training_function, (model,), num_processes=2)"""
TRAINER = """\
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    "trained", use_cpu=True, report_to=[], max_steps=90, logging_steps=1, save_strategy="no",
    per_device_train_batch_size=8,
)
trainer = Trainer(model, arguments, train_dataset=tokens)
notebook_launcher(trainer.train, num_processes=2)"""
PLAIN = """\
def alone(model):
    optimizer = AdamW(model.parameters(), lr=3e-4)
    for epoch in range(2):
        for batch in DataLoader(tokens, batch_size=8):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()

notebook_launcher(alone, (model,), num_processes=1)"""


@pytest.fixture(scope="module")
def page(open_notebook: Open) -> Iterator[NotebookPage]:
    found = open_notebook("seen_loops", [SETUP, COURSE, TRAINER, PLAIN])
    # What packages print when the notebook imports them is no launch's.
    found.run_cell(0)
    yield found
    found.close()


@pytest.mark.parametrize("number", [1, 2, 3], ids=["course", "trainer", "one process"])
def test_it_is_seen_without_a_line_of_code(page, number):
    page.run_cell(number, wait=False)
    page.wait_idle()
    cell = page.cell(number)
    summary = cell.locator("details").first.inner_text()
    steps = {1: 120, 2: 90, 3: 120}[number]
    assert f"step {steps} (" in summary
    assert "samples/s" in summary
    assert "loss " in summary
    assert cell.locator("img[alt^='loss: from']").count() == 1
    # What libraries print in the notebook's own process is shown as ever; of workers it is folded.
    errors = [o["text"] for o in page.outputs(number) if o.get("name") == "stderr"]
    lines = [line for text in errors for line in "".join(text).splitlines()]
    assert [line for line in lines if line.startswith("[0")] == []


def test_what_the_browser_complains_of_fails_a_test(page):
    page.page.evaluate("console.error('a complaint')")
    page.page.evaluate("fetch('https://example.org/x').catch(() => 0)")
    with pytest.raises(AssertionError, match="a complaint"):
        page.check()
    assert "request: https://example.org/x" in page.complaints
    page.complaints.clear()
