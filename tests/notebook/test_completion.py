"""Tab in our lines, before there are workers."""

from __future__ import annotations

import pytest

from tests.kernel.kernel import Kernel
from tests.notebook.asking import complete


@pytest.fixture(scope="module")
def prepared(kernel: Kernel) -> Kernel:
    kernel.run(
        """
        import nbaccel
        my_config = nbaccel.RunConfig()
        my_plan = nbaccel.resolve(my_config)
        my_number = 3
        """
    ).check()
    return kernel


@pytest.mark.parametrize(
    ("code", "offered"),
    [
        ("%%accelerate --num-p‸\nx = 1", ["%%accelerate --num-processes"]),
        ("%%accelerate -n 2 --prec‸", ["%%accelerate -n 2 --precision"]),
        (
            "%%accelerate --no-‸",
            ["%%accelerate --no-activation-checkpointing", "%%accelerate --no-share-back"],
        ),
        (
            "%%accelerate --precision ‸\nx",
            [f"%%accelerate --precision {word}" for word in ("no", "fp16", "bf16", "fp8")],
        ),
        ("%%accelerate --precision=b‸", ["%%accelerate --precision=bf16"]),
        ("%%accelerate --zero 2‸", ["%%accelerate --zero 2"]),
        ("%%accelerate --autoreload ‸", [f"%%accelerate --autoreload {w}" for w in ("on", "off")]),
        (
            "%%accelerate --config my_‸",
            [f"%%accelerate --config my_{w}" for w in ("config", "plan")],
        ),
        ("\n%%time\n%%accelerate --devi‸", ["%%accelerate --device"]),
        ("%accelerate st‸", ["%accelerate status", "%accelerate stop"]),
        ("x = 1\n%accelerate restart --start-m‸", ["%accelerate restart --start-method"]),
        ("%accelerate push my_n‸", ["%accelerate push my_number"]),
        ("%accelerate push my_plan,my_n‸", ["%accelerate push my_plan,my_number"]),
        ("%accelerate pull --ra‸", ["%accelerate pull --ranks"]),
    ],
)
def test_what_can_stand_there_is_offered_and_nothing_else(
    prepared: Kernel, code: str, offered: list[str]
) -> None:
    assert sorted(complete(prepared, code)) == sorted(offered)


def test_all_options_are_offered_but_those_already_there(prepared: Kernel) -> None:
    found = complete(prepared, "%%accelerate --num-processes 2 --‸")
    assert "%%accelerate --num-processes 2 --ranks" in found
    assert "%%accelerate --num-processes 2 --mixed-precision" in found
    assert "%%accelerate --num-processes 2 --num-processes" not in found


def test_other_cells_complete_as_ever(prepared: Kernel) -> None:
    assert complete(prepared, "my_num‸") == ["my_number"]
    assert complete(prepared, "%%accelerate\nmy_num‸") == ["my_number"]
    assert complete(prepared, "print('%accelerate rest‸')") == []
