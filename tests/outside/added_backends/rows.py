"""The rows, named by entry points. Nothing heavy is imported here."""

from __future__ import annotations

from nbaccel.capability_rows import DeviceRow, Fp8Row, PrecisionRow, StrategyRow

DEVICE = DeviceRow(
    name="abacus",
    meaning="beads that compute like a CPU",
    needs="an abacus",
    path="added_backends.device:Abacus",
    label="bead frame",
    words=("beads",),
    precisions=("no", "bf16"),
    strategies=("single", "ddp"),
    start_methods=("template", "fork", "inline"),
    in_host_memory=True,
    variables=(("ABACUS_BEADS", "10"),),
)
PRECISION = PrecisionRow(
    name="bead16",
    meaning="bfloat16 by another name",
    needs="nothing",
    words=("beads16",),
    path="added_backends.precision:Bead16",
    dtype="bfloat16",
    devices=("abacus", "cpu"),
    strategies=("single", "ddp"),
)
STRATEGY = StrategyRow(
    name="averaging",
    meaning="every process holds the model, and gradients are averaged one by one",
    needs="nothing",
    path="added_backends.strategy:Averaging",
    headline="averaged",
    devices=("abacus", "cpu"),
    precisions=("no", "bf16", "bead16"),
    processes="several",
    settings="added_backends.settings:AveragingSettings",
)
FP8 = Fp8Row(
    name="bead8",
    meaning="weights rounded to 8 bits in each forward",
    needs="the package added_backends",
    package="added_backends",
    path="added_backends.fp8:Bead8",
    devices=("abacus", "cpu"),
    strategies=("single", "ddp", "averaging"),
    settings=("margin",),
)
FP8_ELSEWHERE = Fp8Row(
    name="lost8",
    meaning="computes with a package that is not there",
    needs="the package lost_beads",
    package="lost_beads",
    path="added_backends.fp8:Bead8",
    devices=("abacus",),
)
NO_ROW = "a text"
