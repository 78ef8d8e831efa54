"""What the magics say to a notebook that has no workers yet."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from IPython import version_info

from tests import needs
from tests.kernel.kernel import Kernel
from tests.notebook.asking import complete

AFTER_TIME = pytest.mark.skipif(
    version_info < (8,), reason="IPython 7's %%time shows errors without the line of the cell"
)


@pytest.fixture(scope="module", autouse=True)
def no_workers(kernel: Kernel) -> None:
    kernel.run("import nbaccel; nothing_said = nbaccel.RunConfig()").check()
    kernel.run("%accelerate stop").check()
    kernel.run("%accelerate config --config nothing_said").check()


def refused(kernel: Kernel, code: str) -> str:
    """What the user sees: his own line and the reason, nothing between them."""
    cell = kernel.run(code)
    assert cell.error == "ConfigError", cell
    text = "\n".join(cell.traceback)
    for frame in ("IPython", "run_cell_magic", "run_line_magic", "nbaccel/", "site-packages"):
        assert frame not in text
    assert "Cell In[" in text
    return " ".join(text.split())


@needs.DEEPSPEED_ROW
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("%%accelerate -n 0\n1", ("1 %%accelerate -n 0", "num_processes must be", "got '0'")),
        ("%%accelerate --zero 4\n1", ("zero_stage must be one of 0, 1, 2, 3",)),
        ("%%accelerate\n", ("no code below %%accelerate", "%accelerate restart")),
        ("%%accelerate -n 2\n\n  \n", ("no code below %%accelerate",)),
        ("%%accelerate --ranks 2 -n 2\n1", ("ranks are 0-1: got 2",)),
        ("\n\n%%accelerate --foo\n1", ("1 %%accelerate --foo", "no option '--foo'")),
        pytest.param("%%time\n%%accelerate -n x\n1", ("1 %%time", "got 'x'"), marks=AFTER_TIME),
        ("%accelerate restrat", ("'restrat'", "Did you mean 'restart'?")),
        ("%accelerate frobnicate", ("They are: status, restart, stop",)),
        ("%accelerate -n 4", ("Write %accelerate restart -n 4",)),
        ("x = 1\n%accelerate pull", ("2 %accelerate pull", "got no names")),
        ("%accelerate pull loss", ("cannot be pulled from workers: there are none",)),
        ("%accelerate push x", ("cannot be pushed to workers: there are none",)),
        ("%accelerate config -n 0", ("num_processes must be",)),
        ("%accelerate config --precision fp8 --fp8 te", ("'te' needs transformer_engine",)),
    ],
)
def test_a_refusal_shows_the_line_and_the_way_out(kernel, code, said):
    text = refused(kernel, code)
    for part in said:
        assert part in text


def test_help_is_shown_and_the_settings_of_the_next_start_are_kept_and_explained(kernel):
    for code in ("%%accelerate --help", "%%accelerate -h\nraise SystemExit"):
        assert "-n, --num-processes N" in kernel.run(code).check().stdout
    for code in ("%accelerate --help", "%accelerate help"):
        assert "pull NAME..." in kernel.run(code).check().stdout
    assert "--ranks" in kernel.run("%accelerate pull --help").check().stdout

    told = kernel.run("%accelerate config -n 2 --precision bf16").check().stdout
    assert told.startswith("Next start: RunConfig(num_processes=2, mixed_precision='bf16')\n")
    assert "2 CPU workers, 1 thread each, bf16, started from the template" in told
    assert "mixed_precision" in told
    refused(kernel, "%accelerate config -n 0")
    kernel.run("%accelerate config --precision no").check()
    assert "RunConfig(num_processes=2)\n" in kernel.run("%accelerate config").check().stdout
    assert "starts 2 CPU workers" in kernel.run("%accelerate status").check().stdout
    assert kernel.run("%accelerate stop").check().stdout == "There are no workers to stop.\n"
    kernel.run("%accelerate config -n none").check()


@pytest.fixture(autouse=True)
def leaves_its_names_to_nobody(kernel: Kernel) -> Iterator[None]:
    """Another file's tests use the same kernel."""
    yield
    kernel.run("for _ in ('net', 'batch', 'picker', 'my_form'): globals().pop(_, None)").check()


# Also those that were opened before, which set the next start no more.
CHOOSE = """
import gc
from nbaccel.notebook.pickers import Picker
pickers = [found for found in gc.get_objects() if isinstance(found, Picker)]
for picker in pickers:
    picker.choose('num_processes', 2)
"""


@needs.DEEPSPEED_ROW
def test_config_alone_opens_a_picker_for_the_next_start(kernel):
    shown = kernel.run("%accelerate config").check()
    kinds = {kind for data in shown.displays for kind in data}
    assert "application/vnd.jupyter.widget-view+json" in kinds
    assert any("ZeRO stage" in data.get("text/html", "") for data in shown.displays)

    kernel.run(CHOOSE).check()
    assert "starts 2 CPU workers" in kernel.run("%accelerate status").check().stdout
    kernel.run("%accelerate config -n 3 --precision bf16").check()
    configs = kernel.run("print([picker.config for picker in pickers])").check().stdout
    found = configs.count("RunConfig(num_processes=3, mixed_precision='bf16')")
    assert found == 1, "a form that is open follows"
    kernel.run("%accelerate config -n none --precision no").check()


@pytest.mark.slow
def test_config_takes_the_model_for_the_memory_that_it_shows(kernel):
    kernel.run("import torch; net, batch = torch.nn.Linear(8, 2), torch.ones(4, 8)").check()
    shown = kernel.run("%accelerate config net batch").check()
    # The form is there at once, and its table once the memory has been estimated.
    tables = [data["text/html"] for data in shown.displays if "text/html" in data]
    assert "activations" in tables[-1]
    assert "no variable 'nett'" in refused(kernel, "%accelerate config nett")
    assert "names are for the memory" in refused(kernel, "%accelerate config net -n 2")
    assert "a model and a batch at most" in refused(kernel, "%accelerate config net batch net")
    assert "is no module" in refused(kernel, "%accelerate config batch")


def test_a_picker_is_taken_by_name_and_read_in_workers(kernel):
    kernel.run(
        "import nbaccel\nmy_form = nbaccel.Picker(nbaccel.RunConfig(num_processes=2))\n"
        "my_form.choose('mixed_precision', 'bf16')"
    ).check()
    cell = "%%accelerate --config my_form\nprint(type(my_form).__name__, my_form)"
    assert kernel.run(cell).check().stdout == (
        "[0-1] RunConfig RunConfig(num_processes=2, mixed_precision='bf16')\n"
    )
    kernel.run("%accelerate stop").check()
    kernel.run("%accelerate config --config nothing_said").check()


PREPARE = """
import nbaccel
my_config = nbaccel.RunConfig()
my_plan = nbaccel.resolve(my_config)
my_number = 3
"""
CELL = "%%accelerate "
OFFERED = {
    CELL + "--num-p‸\nx = 1": [CELL + "--num-processes"],
    CELL + "-n 2 --prec‸": [CELL + "-n 2 --precision"],
    CELL + "--no-‸": [CELL + "--no-activation-checkpointing", CELL + "--no-share-back"],
    CELL + "--precision ‸\nx": [CELL + f"--precision {w}" for w in ("no", "fp16", "bf16", "fp8")],
    CELL + "--num-processes 2 --num‸": [CELL + "--num-processes 2 --num-nodes"],
    CELL + "--precision=b‸": [CELL + "--precision=bf16"],
    CELL + "--zero 2‸": [CELL + "--zero 2"],
    CELL + "--config my_‸": [CELL + f"--config my_{word}" for word in ("config", "plan")],
    "\n%%time\n%%accelerate --devi‸": [CELL + "--device"],
    "%accelerate st‸": ["%accelerate status", "%accelerate stop"],
    "x = 1\n%accelerate restart --start-m‸": ["%accelerate restart --start-method"],
    "%accelerate push my_n‸": ["%accelerate push my_number"],
    "%accelerate push my_plan,my_n‸": ["%accelerate push my_plan,my_number"],
    "%accelerate pull --ra‸": ["%accelerate pull --ranks"],
    # Other cells complete as ever.
    "my_num‸": ["my_number"],
    "%%accelerate\nmy_num‸": ["my_number"],
    "print('%accelerate rest‸')": [],
}


def test_what_can_stand_there_is_offered_and_nothing_else(kernel):
    kernel.run(PREPARE).check()
    for code, offered in OFFERED.items():
        assert sorted(complete(kernel, code)) == sorted(offered), code
