"""The lanes: sets of versions that people have, and what is run with each."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LANES", "Lane"]

# What every lane installs beside nbaccel.
_TOOLS = (
    *("pytest>=8.3", "pytest-timeout", "pytest-xdist", "hypothesis"),
    *("ipykernel", "nbclient", "packaging"),
)
_NOTEBOOKS = tuple(
    f"notebooks/{name}.ipynb" for name in ("01_quickstart", "04_live_workers", "06_pickers")
)
_CORE = (
    "tests/launch/test_launch.py",
    "tests/pool/test_pool.py",
    "tests/accelerator/test_prepare.py",
    "tests/strategies/test_ddp.py",
    "tests/strategies/test_fsdp.py",
    "tests/kernel/test_cells.py",
)
_IN_NOTEBOOKS = (
    "tests/notebook/test_extension.py",
    "tests/notebook/test_magics.py",
    "tests/notebook/test_completion.py",
    "tests/notebook/test_pickers.py",
    "tests/kernel/test_cells.py",
    "tests/kernel/test_rendering.py",
    "tests/kernel/test_stop.py",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One set of versions.

    Attributes:
        python: Which Python.
        title: Whose versions these are.
        tests: Files of tests.
        notebooks: Notebooks that are run from beginning to end.
        packages: What is installed beside nbaccel and what all lanes have.
        front_end: Where a browser shows it; none where kernels alone are asked.
    """

    python: str
    title: str
    tests: tuple[str, ...]
    notebooks: tuple[str, ...] = ()
    packages: tuple[str, ...] = field(default=())
    front_end: str = "kernel alone"

    @property
    def all_packages(self) -> tuple[str, ...]:
        """All that is installed beside nbaccel."""
        return (*_TOOLS, *self.packages)


# DeepSpeed, because notebook 06 chooses ZeRO; neither image has it.
_OF_NOTEBOOKS = ("ipywidgets", "matplotlib", "scikit-learn", "tqdm", "deepspeed==0.19.8")

LANES: dict[str, Lane] = {
    "colab": Lane(
        python="3.12",
        title="Colab",
        tests=(*_IN_NOTEBOOKS, "tests/browser/test_classic.py"),
        notebooks=_NOTEBOOKS,
        packages=(*_OF_NOTEBOOKS, "notebook", "playwright>=1.50"),
        front_end="Notebook 6.5",
    ),
    "kaggle": Lane(
        python="3.11",
        title="Kaggle",
        tests=_IN_NOTEBOOKS,
        notebooks=_NOTEBOOKS,
        packages=_OF_NOTEBOOKS,
    ),
    "oldest": Lane(
        python="3.10",
        title="oldest torch, oldest Python",
        tests=_CORE,
        packages=("ipywidgets",),
    ),
    "newest": Lane(
        python="3.13",
        title="newest torch, newest Python",
        tests=_CORE,
        packages=("ipywidgets",),
    ),
}
