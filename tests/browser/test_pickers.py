"""A person picks: with the mouse, with the keyboard alone, in JupyterLab and in Notebook 7."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, expect

from nbaccel.config import RunConfig
from tests.browser.conftest import APPLICATIONS, WINDOW, Open
from tests.browser.page import CONTRAST, NotebookPage

pytestmark = [pytest.mark.slow, pytest.mark.browser]

# The widgets are the same in both; where keys, focus or files come in, Notebook 7 is asked as well.
IN_LAB = pytest.mark.parametrize("page", ["lab"], indirect=True)
MAX_CLICKS = 3
MAX_HEIGHT, WIDTH = 700, 1296
# The first cell stands for a user's notebook: seven billion parameters, and two GPUs described.
CELLS = [
    "import torch\n"
    "from torch import nn\n"
    "from nbaccel import RunConfig, notebook_launcher\n"
    "from nbaccel.notebook.pickers import Picker, configure\n"
    "from nbaccel.plan import Gpu, Inventory\n"
    "with torch.device('meta'):\n"
    "    big = nn.Sequential(*[nn.Linear(8192, 8192) for _ in range(100)])\n"
    "gpus = tuple(Gpu(index=number, name='NVIDIA H100', total_bytes=80 * 2**30,\n"
    "                 free_bytes=78 * 2**30, compute_capability=(9, 0)) for number in range(2))\n"
    "machine = Inventory(cpu_cores=32, host_total_bytes=256 * 2**30, gpus=gpus,\n"
    "                    host_available_bytes=200 * 2**30, torch_version='2.13.0+cu130')\n",
    "picker = Picker(model=big, sample_batch=torch.empty(4, 8192, device='meta'),\n"
    "                inventory=machine)\n"
    "picker",
    "print(repr(picker.config))",
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
SHOW, PRINT, SHOW_SMALL, LAUNCH, BUSY, SLOW = range(1, 7)
COUNT_CLICKS = """(root) => {
    root.nbaccelClicks = 0;
    root.addEventListener("click", () => { root.nbaccelClicks += 1; }, true);
}"""
WRONG = """{
  "zero_optimization": {
    "stage": 2,
    "overlap_com": true
  },
  "gradient_clipping": "much"
}"""


class PickerPage:
    """The picker in a cell's output."""

    def __init__(self, page: NotebookPage, cell: int = SHOW) -> None:
        self.page = page
        self.root = page.cell(cell).locator(".nbaccel-picker")

    def find(self, css_class: str) -> Locator:
        return self.root.locator(f".nbaccel-{css_class}")

    def option(self, setting: str, value: str) -> Locator:
        return self.find(setting).locator(f".nbaccel-option-{value}")

    def way(self, name: str) -> Locator:
        """The button of a way to train."""
        return self.find("candidates").get_by_text(name, exact=True)

    def line(self, setting: str) -> Locator:
        return self.find(setting).locator("input")

    def faces(self) -> Locator:
        """The configuration as text, opened where it is not."""
        if self.find("faces").count() == 0:
            self.find("opens-faces").click()
        return self.root.locator("pre")

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


def test_one_picker_is_shown_and_what_is_kept_of_it_is_not(picker):
    expect(picker.root).to_have_count(1)
    expect(picker.root).to_be_visible()
    expect(picker.page.page.locator("div.nbaccel-static").first).to_be_hidden()


@IN_LAB
def test_it_is_low_enough_to_be_seen_whole(picker):
    picker.page.page.set_viewport_size({**WINDOW, "width": WIDTH})
    try:
        for name in ("FSDP", "ZeRO-2, optimizer on the CPU"):
            picker.way(name).click()
            expect(picker.find("taken")).to_contain_text(name)
            box = picker.root.bounding_box()
            assert box is not None
            assert box["height"] <= MAX_HEIGHT, name
    finally:
        picker.page.page.set_viewport_size(WINDOW)


def test_seven_billion_parameters_fit_on_two_gpus_after_at_most_three_clicks(picker):
    expect(picker.find("taken")).to_contain_text("Does not fit")
    picker.root.evaluate(COUNT_CLICKS)
    picker.option("mixed_precision", "bf16").click()
    is_on(picker.option("mixed_precision", "bf16"))
    best = picker.find("strip-row").filter(has_text="★ best")
    expect(best).to_have_count(1)
    number = best.evaluate("(row) => [...row.parentElement.children].indexOf(row)")
    picker.find(f"candidate-{number}").click()
    expect(picker.find("taken")).to_contain_text("Fits: ")
    assert picker.root.evaluate("(root) => root.nbaccelClicks") <= MAX_CLICKS
    config = picker.config()
    assert config.mixed_precision == "bf16"
    assert config.zero_stage or config.strategy == "fsdp"


@IN_LAB
@pytest.mark.parametrize("width", [WIDTH, 720, 500])
def test_bars_stand_over_their_buttons_in_windows_of_any_width(picker, width):
    picker.page.page.set_viewport_size({**WINDOW, "width": width})
    try:
        assert picker.root.evaluate(MISPLACED) == []
    finally:
        picker.page.page.set_viewport_size(WINDOW)


MISPLACED = """(root) => {
    const buttons = [...root.querySelectorAll(".nbaccel-candidates button:not(.nbaccel-hidden)")];
    const rows = [...root.querySelectorAll(".nbaccel-strip-row")];
    if (rows.length < 8 || rows.length !== buttons.length) return [rows.length, buttons.length];
    return buttons.map((button, i) => [button.getBoundingClientRect(), rows[i], button])
        .filter(([box, row]) => Math.abs(box.top - row.getBoundingClientRect().top) > 1
            || Math.abs(box.height - row.getBoundingClientRect().height) > 1
            || row.querySelector(".nbaccel-track").getBoundingClientRect().width < 50)
        .map(([box, row, button]) => `${button.textContent}: ${box.top}`);
}"""


def test_the_same_with_the_keyboard_alone(picker):
    press, focused = picker.page.press, picker.page.focused
    picker.line("num_processes").first.focus()
    press("Tab")
    # The front end hands keys on in several threads: each answer is awaited before the next key.
    for precision in ("fp16", "bf16"):
        press("ArrowRight")
        expect(picker.root.locator(".nbaccel-options .mod-active").first).to_have_text(precision)
    press("Tab")
    expect(focused()).to_have_text("one copy each (DDP)")
    press("ArrowDown")
    expect(picker.find("taken")).to_contain_text("FSDP")
    expect(focused()).to_have_text("FSDP")
    press("ArrowUp")
    expect(picker.find("taken")).to_contain_text("one copy each")
    press("ArrowUp")  # around the corner, past one that cannot be taken
    expect(picker.find("taken")).to_contain_text("ZeRO-3, all on the CPU")
    cells = picker.page.page.locator(".jp-Notebook .jp-Cell")
    press("x", "d", "d")  # in a notebook these cut and delete the cell
    expect(cells).to_have_count(len(CELLS))
    config = picker.config()
    assert (config.mixed_precision, config.zero_stage) == ("bf16", 3)
    assert config.deepspeed["zero_optimization"]["offload_param"] == {"device": "cpu"}


@IN_LAB
def test_the_form_is_there_while_the_memory_is_still_being_estimated(picker):
    page = picker.page
    page.run_cell(SHOW_SMALL)  # makes the model
    page.run_cell(BUSY)
    slow = PickerPage(page, SLOW)
    page.run_cell(SLOW, wait=False)
    expect(slow.option("mixed_precision", "bf16")).to_be_visible()
    expect(slow.find("strip-head")).to_contain_text("Memory is being estimated")
    (page.path.parent / "seen").touch()  # the estimate has waited for this
    expect(slow.find("taken")).to_contain_text("Fits: ")
    expect(slow.find("bars")).to_contain_text("activations")
    page.wait_idle()


def test_mistakes_of_a_pasted_file_are_seen_at_their_lines_without_scrolling(picker):
    picker.find("opens-editor").click()
    text = picker.find("text").locator("textarea")
    text.scroll_into_view_if_needed()
    expect(picker.find("apply")).to_be_disabled()
    text.focus()
    picker.page.press("ControlOrMeta+a")
    picker.page.page.keyboard.insert_text(WRONG)
    told = picker.find("mistakes")
    for part, line in (("overlap_comm", 4), ("much", 6)):
        item = told.locator("li", has_text=part)
        expect(item).to_contain_text(f"line {line}")
        expect(item).to_be_in_viewport(ratio=1)
    expect(text).to_be_in_viewport()
    expect(picker.find("apply")).to_be_disabled()
    told.locator("button", has_text="line 4").click()
    selected = "(area) => area.value.slice(area.selectionStart, area.selectionEnd)"
    assert text.evaluate(selected) == '    "overlap_com": true'
    assert picker.config() == RunConfig()


@IN_LAB
def test_in_a_narrow_window_whether_it_fits_stays_in_sight(picker):
    picker.page.page.set_viewport_size({"width": 720, "height": 620})
    try:
        picker.find("opens-all").click()
        picker.find("opens-launch--common").click()
        picker.find("start_method").scroll_into_view_if_needed()
        picker.root.locator(".nbaccel-use_port").scroll_into_view_if_needed()
        expect(picker.find("part-1")).not_to_be_in_viewport()
        expect(picker.find("candidates")).not_to_be_in_viewport()
        expect(picker.find("taken")).to_be_in_viewport(ratio=1)
        expect(picker.find("taken-bar")).to_be_in_viewport(ratio=1)
    finally:
        picker.page.page.set_viewport_size(WINDOW)


@IN_LAB
def test_copy_puts_the_text_into_the_clipboard(picker):
    text = picker.faces()
    picker.find("face-yaml").click()
    picker.option("mixed_precision", "bf16").click()
    expect(text).to_contain_text("mixed_precision: bf16")
    picker.find("copy").click()
    expect(picker.find("copy")).to_have_text("Copied")
    copied = picker.page.page.evaluate("navigator.clipboard.readText()")
    assert copied == "mixed_precision: bf16\n"


NAMELESS = """(root) => [...root.querySelectorAll("button, input, select, textarea")]
    .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel || e.title))
    .map((e) => e.outerHTML)"""
ROLES = ("button", "radiogroup", "radio", "textbox", "img")


@IN_LAB
def test_a_screen_reader_finds_a_name_for_everything(picker):
    for heading in ("opens-all", "opens-editor", "opens-faces"):
        picker.find(heading).click()
        expect(picker.find(heading)).to_have_attribute("aria-expanded", "true")
    expect(picker.find("apply")).to_be_visible()
    told = picker.root.aria_snapshot()
    found = re.findall(rf"^\s*- '?({'|'.join(ROLES)})( \"[^\"]+\")?", told, flags=re.MULTILINE)
    assert len(found) > 40
    assert {role for role, _ in found} == set(ROLES)
    assert not [role for role, name in found if not name]
    assert picker.root.evaluate(NAMELESS) == []
    assert re.search(r'radio "fp32" \[checked\]', told)
    assert re.search(r'radiogroup "Ways to train"', told)
    assert re.search(r'radio "one copy each \(DDP\)" \[checked\]', told)
    assert re.search(r"img .*cuda:0 .*: needs", told)


def test_what_is_suggested_is_launched_on_two_workers(picker):
    page = picker.page
    page.run_cell(SHOW_SMALL)
    small = PickerPage(page, SHOW_SMALL)
    expect(small.find("use")).to_contain_text("config=launch)")
    small.line("num_processes").fill("2")
    small.line("num_processes").press("Enter")
    small.option("mixed_precision", "bf16").click()
    small.find("suggest").click()
    small.find("take").first.click()
    expect(small.find("remark").first).to_contain_text("Suggested")
    page.wait_idle()
    page.run_cell(LAUNCH)
    assert "[(2, 'bf16'), (2, 'bf16')]" in page.text(LAUNCH), page.text(LAUNCH)


@IN_LAB
def test_what_is_pressed_while_a_cell_runs_is_not_lost(picker):
    page = picker.page
    page.run_cell(BUSY, wait=False)
    expect(page.cell(BUSY).locator(".jp-OutputArea-output")).to_contain_text("running")
    picker.option("mixed_precision", "bf16").click()
    picker.way("ZeRO-1").click()
    is_on(picker.way("ZeRO-1"))
    page.wait_idle()
    config = picker.config()
    assert (config.mixed_precision, config.zero_stage) == ("bf16", 1)


def test_without_its_kernel_the_saved_notebook_still_shows_what_was_picked(
    picker, browser, tmp_path
):
    """As GitHub and nbconvert show it: no kernel, no widget, no script from elsewhere."""
    from nbconvert import HTMLExporter

    picker.option("mixed_precision", "bf16").click()
    picker.way("ZeRO-3").click()
    is_on(picker.way("ZeRO-3"))
    kept_text = picker.page.page.locator("div.nbaccel-static").first
    expect(kept_text).to_contain_text("Shards optimizer, gradients and")
    picker.page.save()
    html, _ = HTMLExporter().from_filename(str(picker.page.path))
    (tmp_path / "static.html").write_text(html)
    with browser.new_page() as reader:
        reader.goto((tmp_path / "static.html").as_uri(), wait_until="commit")
        kept = reader.locator("div.nbaccel-static").first
        expect(kept.locator(".nbaccel-strip-row").first).to_be_visible()
        bar = kept.locator(".nbaccel-segment").first.bounding_box()
        assert bar is not None
        assert bar["width"] > 5, "the bars are drawn as in the form"
        expect(kept.locator("pre")).to_be_hidden()
        kept.locator("summary").click()
        expect(kept.locator("pre")).to_be_visible()
        for words in ("What is trained", "6.71 B parameters", "On what", "GPU 1", "What fits"):
            expect(kept).to_contain_text(words)
        # Each way in each precision, what is chosen and what is best told in words.
        expect(kept).to_contain_text("★ best")
        expect(kept).to_contain_text("zero_stage: 3")
        assert reader.locator(".nbaccel-picker").count() == 0


@IN_LAB
@pytest.mark.parametrize("theme", ["dark", "light"])
def test_text_can_be_read_in_both_themes(picker, theme):
    """The contrast that the guidelines for the web ask for, measured on what is shown."""
    picker.page.set_theme(theme)
    low = picker.root.evaluate(CONTRAST)
    assert not low, low
