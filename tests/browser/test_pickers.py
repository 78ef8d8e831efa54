"""A person picks: with the mouse, with the keyboard alone, in JupyterLab and in Notebook 7."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, expect

from nbaccel.config import RunConfig
from nbaccel.notebook.picker.choices import settings
from nbaccel.notebook.picker.html import css_name
from tests.browser.conftest import APPLICATIONS, Open
from tests.browser.page import NotebookPage

pytestmark = [pytest.mark.slow, pytest.mark.browser]

# The widgets are the same in both; where keys, focus or files come in, Notebook 7 is asked as well.
IN_LAB = pytest.mark.parametrize("page", ["lab"], indirect=True)
PLACE = "zero_optimization-offload_optimizer-device"
BUCKET = "zero_optimization-reduce_bucket_size"
PICKED = RunConfig(
    mixed_precision="bf16",
    zero_stage=3,
    deepspeed={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
)
# The first cell stands for a user's notebook; the machine of the second is the same everywhere.
CELLS = [
    "import torch\n"
    "from torch import nn\n"
    "from nbaccel import RunConfig, inspect_machine, notebook_launcher\n"
    "from nbaccel.notebook.pickers import configure\n"
    "with torch.device('meta'):\n"
    "    big = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(100)])\n",
    "picker = configure(big)\npicker",
    "print(repr(picker.config))",
    "picker.config = RunConfig(mixed_precision='fp16', num_processes=2)",
    "model = nn.Linear(8, 1)\n"
    "batch = torch.randn(4, 8)\n"
    "def train(model):\n"
    "    from nbaccel import Accelerator\n"
    "    accelerator = Accelerator()\n"
    "    return accelerator.num_processes, accelerator.mixed_precision\n"
    "launch = configure(model, batch, config=RunConfig(num_processes=1))",
    "notebook_launcher(train, (model,), config=launch)",
    "import time\nprint('running', flush=True)\ntime.sleep(1.5)",
    "from pathlib import Path\n"
    "from nbaccel.memory import activations\n"
    "measure = activations.measure_activations\n"
    "def hold(*arguments, **options):\n"
    "    while not Path('seen').exists():\n"
    "        time.sleep(0.01)\n"
    "    return measure(*arguments, **options)\n"
    "activations.measure_activations = hold\n"
    "slow = configure(model, batch)\n"
    "activations.measure_activations = measure",
]
SHOW, PRINT, SET, SHOW_SMALL, LAUNCH, BUSY, SLOW = range(1, 8)


class PickerPage:
    """The picker in a cell's output."""

    def __init__(self, page: NotebookPage, cell: int = SHOW) -> None:
        self.page = page
        self.root = page.cell(cell).locator(".nbaccel-picker")

    def find(self, css_class: str) -> Locator:
        return self.root.locator(f".nbaccel-{css_class}")

    def option(self, setting: str, value: str) -> Locator:
        return self.find(setting).locator(f".nbaccel-option-{value}")

    def line(self, setting: str) -> Locator:
        return self.find(setting).locator("input")

    @property
    def json(self) -> dict[str, object]:
        return json.loads(self.root.locator("pre").inner_text())

    def config(self) -> RunConfig:
        """What Python holds."""
        self.page.run_cell(PRINT)
        return eval(self.page.text(PRINT), {"RunConfig": RunConfig})


def is_on(button: Locator) -> None:
    expect(button).to_have_class(re.compile("mod-active"))


@pytest.fixture(scope="module", params=APPLICATIONS)
def page(request: pytest.FixtureRequest, open_notebook: Open) -> Iterator[NotebookPage]:
    found = open_notebook(f"pickers_{request.param}", CELLS, application=request.param)
    found.run_cell(0)
    yield found
    found.close()
    found.check()


@pytest.fixture
def picker(page: NotebookPage) -> Iterator[PickerPage]:
    page.run_cell(SHOW)
    yield PickerPage(page)
    page.check()


def test_one_picker_is_shown_and_its_table_is_not(picker):
    expect(picker.root).to_have_count(1)
    expect(picker.root).to_be_visible()
    expect(picker.page.page.locator(".nbaccel-static").first).to_be_hidden()


def test_precision_stage_and_offload_with_the_mouse(picker):
    bars = picker.find("bars")
    before = bars.inner_text()
    picker.option("mixed_precision", "bf16").click()
    is_on(picker.option("mixed_precision", "bf16"))
    picker.option("zero_stage", "3").click()
    expect(picker.root.locator("pre")).to_contain_text('"stage": 3')
    picker.option(PLACE, "cpu").click()
    expect(picker.root.locator("pre")).to_contain_text('"device": "cpu"')
    assert picker.json["bf16"] == {"enabled": True}
    expect(bars).not_to_have_text(before)
    assert "✗" in bars.inner_text()
    assert picker.config() == PICKED


def test_the_same_with_the_keyboard_alone(picker):
    press, focused = picker.page.press, picker.page.focused
    picker.find("suggest").focus()
    is_first = picker.option("mixed_precision", "no")
    for _ in range(5):
        press("Tab")
        if is_first.evaluate("(button) => button === document.activeElement"):
            break
    press("ArrowRight", "ArrowRight")
    is_on(picker.option("mixed_precision", "bf16"))
    press("Tab")
    expect(focused()).to_have_text("off")
    press("ArrowLeft")  # around the corner
    is_on(picker.option("zero_stage", "3"))
    expect(picker.option(PLACE, "cpu")).to_be_enabled()
    press("Tab")
    press("ArrowDown")
    is_on(picker.option(PLACE, "cpu"))
    expect(focused()).to_have_text("CPU")
    cells = picker.page.page.locator(".jp-Notebook .jp-Cell")
    press("x", "d", "d")  # in a notebook these cut and delete the cell
    expect(cells).to_have_count(len(CELLS))
    assert picker.config() == PICKED


@IN_LAB
def test_the_form_is_there_while_the_memory_is_still_being_estimated(picker):
    page = picker.page
    page.run_cell(SHOW_SMALL)  # makes the model
    page.run_cell(BUSY)
    slow = PickerPage(page, SLOW)
    page.run_cell(SLOW, wait=False)
    expect(slow.option("zero_stage", "3")).to_be_visible()
    expect(slow.find("memory")).to_contain_text("Memory is being estimated")
    (page.path.parent / "seen").touch()  # the estimate has waited for this
    expect(slow.find("memory")).to_contain_text("Fits: ")
    expect(slow.find("bars")).to_contain_text("activations")
    page.wait_idle()


@IN_LAB
def test_advanced_shows_all_its_fields_and_what_is_changed_there_is_in_the_configuration(picker):
    panel = picker.find("panel-zero")
    picker.option("zero_stage", "3").click()
    is_on(picker.option("zero_stage", "3"))
    assert panel.locator(".nbaccel-section").count() == 0
    panel.locator(".nbaccel-opens-advanced").click()
    inside = panel.locator(".nbaccel-section").first
    headings = inside.locator(".nbaccel-opens:visible")
    expect(headings.first).to_be_visible()
    for number in range(headings.count()):
        headings.nth(number).click()
        expect(headings.nth(number)).to_have_attribute("aria-expanded", "true")
    advanced = [setting for setting in settings("zero") if setting.section]
    assert len(advanced) > 50
    expect(inside.locator(".nbaccel-setting")).to_have_count(len(advanced))
    for setting in advanced:
        expect(picker.find(css_name(setting.name))).to_have_count(1)
    line = picker.line("zero_optimization-sub_group_size")
    line.fill("1e6")
    line.press("Enter")
    expect(line).to_have_value("1000000")
    assert picker.config().deepspeed == {"zero_optimization": {"sub_group_size": 1_000_000}}


@IN_LAB
def test_undo_takes_back_one_change_at_a_time(picker):
    undo = picker.find("undo")
    picker.option("mixed_precision", "bf16").click()
    picker.option("zero_stage", "1").click()
    is_on(picker.option("zero_stage", "1"))
    undo.click()
    is_on(picker.option("zero_stage", "none"))
    is_on(picker.option("mixed_precision", "bf16"))
    undo.click()
    is_on(picker.option("mixed_precision", "no"))
    assert picker.config() == RunConfig()


@IN_LAB
def test_space_presses_and_enter_opens(picker):
    picker.find("panel-launch").locator(".nbaccel-opens").first.focus()
    picker.page.press("Enter")
    expect(picker.find("max_restarts")).to_be_visible()
    picker.page.press("Space")
    expect(picker.find("max_restarts")).to_be_hidden()


def test_what_is_greyed_says_why_and_cannot_be_chosen(picker):
    cpu = picker.option(PLACE, "cpu")
    expect(cpu).to_be_disabled()
    expect(cpu).to_have_attribute("title", re.compile("choose a ZeRO stage first"))
    expect(picker.find(PLACE)).to_contain_text("choose a ZeRO stage first")
    cpu.click(force=True)
    assert picker.config() == RunConfig()
    picker.option("zero_stage", "2").click()
    expect(cpu).to_be_enabled()
    nvme = picker.option(PLACE, "nvme")
    expect(nvme).to_be_disabled()
    expect(picker.find(PLACE)).to_contain_text("needs ZeRO stage 3")


def test_a_wrong_number_is_told_beside_its_field(picker):
    picker.option("zero_stage", "2").click()
    line = picker.line(BUCKET)
    expect(line).to_be_enabled()
    before = picker.config()
    line.fill("many")
    line.press("Enter")
    expect(picker.find(BUCKET).get_by_role("alert")).to_contain_text("many")
    expect(line).to_have_value("many")
    assert picker.config() == before
    line.fill("2e8")
    line.press("Enter")
    expect(picker.find(BUCKET).get_by_role("alert")).to_have_count(0)
    expect(line).to_have_value("200000000")
    expect(picker.root.locator("pre")).to_contain_text("200000000")


def test_pasting_a_typo_tells_it_and_changes_nothing(picker):
    picker.find("opens-load-or-save").click()
    text = picker.find("paste").locator("textarea")
    text.fill('{"zero_optimization": {"stage": 2, "overlap_com": true}}')
    picker.find("take-over").click()
    told = picker.find("load-errors")
    expect(told).to_contain_text("overlap_comm")
    assert picker.config() == RunConfig()
    text.fill('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    picker.find("take-over").click()
    is_on(picker.option("zero_stage", "2"))
    expect(told).to_have_text("")
    expect(text).to_have_value("")
    picker.find("opens-load-or-save").click()


@IN_LAB
def test_what_python_sets_moves_in_the_browser(picker):
    picker.page.run_cell(SET)
    is_on(picker.option("mixed_precision", "fp16"))
    expect(picker.line("num_processes")).to_have_value("2")


@IN_LAB
def test_copy_puts_the_text_into_the_clipboard(picker):
    picker.find("face-yaml").click()
    picker.option("mixed_precision", "bf16").click()
    expect(picker.root.locator("pre")).to_contain_text("mixed_precision: bf16")
    picker.find("copy").click()
    expect(picker.find("copy")).to_have_text("Copied")
    copied = picker.page.page.evaluate("navigator.clipboard.readText()")
    assert copied == "mixed_precision: bf16\n"
    picker.option("zero_stage", "1").click()
    picker.find("face-deepspeed-json").click()


NAMELESS = """(root) => [...root.querySelectorAll("button, input, select, textarea")]
    .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel || e.title))
    .map((e) => e.outerHTML)"""
ROLES = ("button", "radiogroup", "radio", "textbox", "combobox", "img")


@IN_LAB
def test_a_screen_reader_finds_a_name_for_everything(picker):
    told = picker.root.aria_snapshot()
    found = re.findall(rf"^\s*- '?({'|'.join(ROLES)})( \"[^\"]+\")?", told, flags=re.MULTILINE)
    assert len(found) > 40
    assert {role for role, _ in found} == set(ROLES)
    assert not [role for role, name in found if not name]
    assert picker.root.evaluate(NAMELESS) == []
    assert re.search(r'radio "fp32" \[checked\]', told)
    assert re.search(r"img .*host memory: needs", told)


def test_what_is_suggested_is_launched_on_two_workers(picker):
    page = picker.page
    page.run_cell(SHOW_SMALL)
    small = PickerPage(page, SHOW_SMALL)
    small.line("num_processes").fill("2")
    small.line("num_processes").press("Enter")
    small.option("mixed_precision", "bf16").click()
    small.find("suggest").click()
    expect(small.find("remark")).to_contain_text("Suggested")
    page.wait_idle()
    page.run_cell(LAUNCH)
    assert "[(2, 'bf16'), (2, 'bf16')]" in page.text(LAUNCH), page.text(LAUNCH)


@IN_LAB
def test_what_is_pressed_while_a_cell_runs_is_not_lost(picker):
    page = picker.page
    page.run_cell(BUSY, wait=False)
    expect(page.cell(BUSY).locator(".jp-OutputArea-output")).to_contain_text("running")
    picker.option("mixed_precision", "bf16").click()
    picker.option("zero_stage", "1").click()
    is_on(picker.option("zero_stage", "1"))
    page.wait_idle()
    expect(picker.root.locator("pre")).to_contain_text('"stage": 1')
    assert picker.config() == RunConfig(mixed_precision="bf16", zero_stage=1, deepspeed={})


def test_without_its_kernel_the_saved_notebook_still_shows_what_was_picked(
    picker, browser, tmp_path
):
    """As GitHub and nbconvert show it: no kernel, no widget, no script from elsewhere."""
    from nbconvert import HTMLExporter

    picker.option("mixed_precision", "bf16").click()
    picker.option("zero_stage", "3").click()
    is_on(picker.option("zero_stage", "3"))
    table = picker.page.page.locator(".nbaccel-static").first
    expect(table).to_contain_text("Shards optimizer, gradients and weights")
    picker.page.save()
    html, _ = HTMLExporter().from_filename(str(picker.page.path))
    (tmp_path / "static.html").write_text(html)
    with browser.new_page() as reader:
        reader.goto((tmp_path / "static.html").as_uri(), wait_until="commit")
        kept = reader.locator(".nbaccel-static").first
        expect(kept).to_be_visible()
        expect(kept).to_contain_text("Shards optimizer, gradients and weights")
        expect(kept).to_contain_text("too little on host memory")
        expect(kept).to_contain_text("zero_stage: 3")
        assert reader.locator(".nbaccel-picker").count() == 0


@IN_LAB
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_text_can_be_read_in_both_themes(picker, theme):
    """The contrast that the guidelines for the web ask for, measured on what is shown."""
    picker.page.set_theme(theme)
    low = picker.root.evaluate(CONTRAST)
    assert not low, low


CONTRAST = """(root) => {
    const parse = (colour) => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map((part) => {
        const s = part / 255;
        return s <= 0.03928 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    }).reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
    const paper = (element) => {
        for (let e = element; e; e = e.parentElement) {
            const colour = parse(getComputedStyle(e).backgroundColor);
            if (colour.length < 4 || colour[3] > 0.9) return colour;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const e of root.querySelectorAll("*")) {
        const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
        if (!text || !e.checkVisibility() || e.matches("style, :disabled")) continue;
        const [a, b] = [light(parse(getComputedStyle(e).color)), light(paper(e))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${e.className} ${e.textContent}`);
    }
    return found;
}"""
