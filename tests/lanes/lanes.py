"""The lanes: sets of versions that people have, and what is run with each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LANES", "TURNS", "Lane"]

# What the tests themselves need.
_TOOLS = (
    *("pytest>=8.3", "pytest-timeout", "pytest-xdist", "hypothesis"),
    *("ipykernel", "nbclient", "packaging"),
)
_NOTEBOOKS = tuple(
    f"notebooks/{name}.ipynb" for name in ("01_quickstart", "04_live_workers", "06_pickers")
)
_CORE = (
    "tests/calls/test_launch.py",
    "tests/calls/test_pool.py",
    "tests/accelerator/test_prepare.py",
    "tests/strategies/test_ddp.py",
    "tests/strategies/test_fsdp.py",
    "tests/kernel/test_cells.py",
)
_OF_BIG_MODELS = (
    "tests/bigmodel/test_dispatching.py",
    "tests/bigmodel/test_loading.py",
    "tests/bigmodel/test_align_hooks.py",
)
_IN_NOTEBOOKS = (
    "tests/notebook/test_extension.py",
    "tests/notebook/test_magics.py",
    "tests/notebook/test_pickers.py",
    "tests/kernel/test_cells.py",
    "tests/kernel/test_rendering.py",
    "tests/kernel/test_stop.py",
)
_OF_DEEPSPEED = (
    "tests/deepspeed/test_library.py",
    "tests/deepspeed/test_environment.py",
    "tests/deepspeed/strategy/test_bare.py",
    "tests/deepspeed/weights/test_real.py",
)
_OF_NOTEBOOKS = ("ipywidgets", "matplotlib", "scikit-learn", "tqdm")
_OF_TPUS = (
    "tests/tpu/test_launches.py",
    "tests/tpu/test_moments.py",
    "tests/tpu/test_compiles.py",
    "tests/tpu/test_chips_only.py",
    # The tables of topologies, against what the driver would set on the recorded hosts.
    "tests/devices/tpu/test_chip_topology.py",
)
# Libraries that compile start a thread for each core in every process.
_FEW_THREADS = (("OMP_NUM_THREADS", "1"), ("TF_CPP_MIN_LOG_LEVEL", "2"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One set of versions."""

    python: str
    title: str
    # The checkout, on top of the versions in constraints/NAME.txt; the sdist and the wheel that are
    # built from it; or what `binder/` installs.
    source: Literal["checkout", "builds", "binder"] = "checkout"
    extras: str = "notebook"  # of nbaccel, with the checkout
    tests: tuple[str, ...] = ()
    notebooks: tuple[str, ...] = ()
    with_nbval: bool = False  # compares outputs that are marked for that, as `make test` does
    packages: tuple[str, ...] = _TOOLS  # beside nbaccel
    operations: bool = False  # whether DeepSpeed's C++ operations are built before
    variables: tuple[tuple[str, str], ...] = ()
    front_end: str = "kernel alone"  # or where a browser shows it
    pretends_tpu: bool = False  # two pretended chips (`tests/tpu/pretended.py`)
    shared_python: bool = False  # whether Python has to be built with a shared library
    may_be_missing: bool = False  # not every index has its packages: without them it is skipped


LANES: dict[str, Lane] = {
    "colab": Lane(
        python="3.12",
        title="Colab",
        tests=("tests/browser/test_classic.py", *_IN_NOTEBOOKS),
        notebooks=_NOTEBOOKS,
        packages=(*_TOOLS, *_OF_NOTEBOOKS, "notebook", "playwright>=1.50"),
        front_end="Notebook 6.5",
    ),
    "kaggle": Lane(
        python="3.11",
        title="Kaggle",
        # Its kernel is Colab's, whose lane asks it more; what differs are the widgets.
        tests=(
            "tests/notebook/test_magics.py",
            "tests/notebook/test_pickers.py",
            "tests/kernel/test_cells.py",
        ),
        notebooks=_NOTEBOOKS,
        packages=(*_TOOLS, *_OF_NOTEBOOKS),
    ),
    "oldest": Lane(
        python="3.10",
        title="oldest of all",
        tests=(*_CORE, "tests/strategies/test_fsdp_on_cpu.py", *_OF_BIG_MODELS, *_OF_DEEPSPEED),
        extras="notebook,deepspeed",
        packages=(*_TOOLS, *_OF_NOTEBOOKS, "transformers<5", "accelerate", "safetensors"),
        operations=True,
        # The threads of its libgomp forbid a fork once there are any, which is told; the tests
        # that fork a notebook fork one that has none.
        # And torch 2.6 starts processes to compile with as soon as it is imported by DeepSpeed.
        variables=(("OMP_NUM_THREADS", "1"), ("TORCHINDUCTOR_COMPILE_THREADS", "1")),
    ),
    "between": Lane(
        python="3.12",
        title="torch 2.11, Python 3.12",
        tests=(
            *_CORE,
            *_OF_BIG_MODELS,
            "tests/bigmodel/test_hooks.py",
            "tests/bigmodel/test_checkpoint_files.py",
            "tests/calls/test_process_groups.py",
            "tests/calls/test_cell_running.py",
        ),
        packages=(*_TOOLS, "ipywidgets", "matplotlib", "tqdm"),
    ),
    "newest": Lane(
        python="3.13",
        title="newest torch, newest Python",
        tests=(*_CORE, *_OF_BIG_MODELS),
        packages=(*_TOOLS, "ipywidgets", "matplotlib", "tqdm"),
    ),
    "dist": Lane(
        python="3.11",
        title="wheel and sdist, installed",
        source="builds",
        tests=(
            "tests/deepspeed/test_to_fp32.py",
            "tests/plan/test_registry.py",
            "tests/config/test_capabilities.py",
            "tests/notebook/test_pickers.py",
            "tests/kernel/test_rendering.py",
        ),
        packages=(*_TOOLS, "ipywidgets"),
    ),
    "binder": Lane(
        python="3.11", title="`binder/`, installed", source="binder", notebooks=_NOTEBOOKS[:1]
    ),
    # Both drivers compute on the processor here. Nothing of this was run on a TPU.
    "torch_tpu": Lane(
        python="3.11",
        title="TPU: torch_tpu, on the processor",
        tests=(*_OF_TPUS, "tests/tpu/test_guide.py"),
        notebooks=("notebooks/08_tpu.ipynb",),
        with_nbval=True,
        packages=(*_TOOLS, "nbval", "ipywidgets", "psutil", "scikit-learn", "tqdm", "transformers"),
        # As in a notebook that has loaded nbaccel before torch.
        variables=(*_FEW_THREADS, ("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")),
        pretends_tpu=True,
        may_be_missing=True,
    ),
    "torch_xla": Lane(
        python="3.11",
        title="TPU: torch_xla, on the processor",
        tests=(*_OF_TPUS, "tests/tpu/test_guide.py"),
        packages=(*_TOOLS, "ipywidgets", "psutil", "tqdm", "transformers"),
        variables=(*_FEW_THREADS, ("PJRT_DEVICE", "CPU")),
        shared_python=True,
        may_be_missing=True,
    ),
}


TURNS = (
    *(("between",), ("colab",), ("kaggle", "binder"), ("oldest",), ("newest",)),
    *(("torch_tpu",), ("torch_xla",)),
)
"""What landings run beside `dist`, in turn: each lane at every seventh landing at the latest."""
