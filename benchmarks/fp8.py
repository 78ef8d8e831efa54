"""FP8: losses beside float32, bytes per parameter, the exchange of gradients, and GPUs.

    python benchmarks/fp8.py                         loss, memory and exchange; half an hour
    python benchmarks/fp8.py --sections memory       some of it; `gpu` needs a GPU
    python benchmarks/fp8.py --quick --no-page --output /tmp/fp8.json    is it sound? two minutes
    python benchmarks/fp8.py --render                the tables again, from the stored result
    python benchmarks/fp8.py --check                 exit status 1 unless every bar holds

Read docs/pages/figures.md for what each row means.
"""

from __future__ import annotations

import os
import statistics
import sys

# Before torch is imported: figures of one thread, whatever else the machine does.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from harness import fp8_gpu, fp8_memory, fp8_training as training
from harness.report import Report, verdict, versions
from harness.samples import Results, say

SEEDS, STEPS = (0, 1, 2), 400
QUICK_SEEDS, QUICK_STEPS = (0, 1), 10
PACKAGES = ("python", "nbaccel", "torch", "torchao", "transformer_engine")


# ------------------------------------------------------------------------- losses


def losses(results: Results, *, quick: bool) -> None:
    seeds, steps = (QUICK_SEEDS, QUICK_STEPS) if quick else (SEEDS, STEPS)
    results.forget("loss")
    for seed in seeds:
        for way in training.WAYS:
            say(f"seed {seed}: {way.name}")
            found = training.train(way, seed, steps)
            results.of("loss", way.name).values.append(found["loss"])
            results.of("loss", way.name).facts.append({"cpu_ms": found["cpu_ms"]})
    results.note("loss", seeds=list(seeds), steps=steps)
    results.save()


def loss_table(results: Results) -> tuple[str, bool]:
    facts = results.sections["loss"]
    reference = results.of("loss", "fp32").values
    spread = max(reference) - min(reference)
    bf16_ms = _cpu_ms(results, "bf16")
    lines = [
        "| | validation loss, mean | of each seed | more than fp32 | CPU time of a step, to bf16's "
        "| bar |",
        "| --- | --: | --- | --: | --: | --- |",
    ]
    holds = True
    for way in training.WAYS:
        found = results.of("loss", way.name).values
        more = statistics.fmean(found) - statistics.fmean(reference)
        good = abs(more) <= spread
        holds &= good
        each = ", ".join(f"{loss:.4f}" for loss in found)
        cells = [way.name, f"{statistics.fmean(found):.4f}", each]
        cells += ["", f"{_cpu_ms(results, way.name) / bf16_ms:.1f}x", ""]
        if way.name != "fp32":
            cells[3], cells[5] = f"{more:+.4f}", verdict(good)
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"Bar: the mean is off fp32's by at most what fp32's seeds differ among themselves, "
        f"{spread:.4f}. {facts['steps']} steps. {_taken(results, 'loss')}",
    ]
    return "\n".join(lines), holds


def _cpu_ms(results: Results, name: str) -> float:
    return statistics.median(fact["cpu_ms"] for fact in results.of("loss", name).facts)


# ------------------------------------------------------------------------- memory


def memory(results: Results, *, quick: bool) -> None:
    width = 256 if quick else fp8_memory.WIDTH
    results.forget("memory")
    for name in fp8_memory.LEVELS:
        say(f"memory: {name}")
        tensors, grown = fp8_memory.bytes_per_parameter(name, width)
        results.of("memory in tensors", name).values.append(tensors)
        results.of("memory of the process", name).values.append(grown)
    results.note("memory", width=width, layers=fp8_memory.LAYERS)
    results.save()


def memory_table(results: Results) -> tuple[str, bool]:
    facts = results.sections["memory"]
    lines = [
        "| bytes per parameter | by the formats | in the tensors | growth of the process | bar |",
        "| --- | --: | --: | --: | --- |",
    ]
    holds = True
    for name in fp8_memory.LEVELS:
        wanted = fp8_memory.BYTES[name]
        tensors = results.of("memory in tensors", name).values[0]
        grown = results.of("memory of the process", name).values[0]
        good = fp8_memory.is_close(tensors, wanted)
        holds &= good
        told = f"{name}, float32" if name == "AdamW" else name
        lines.append(f"| {told} | {wanted:g} | {tensors:.2f} | {grown:.2f} | {verdict(good)} |")
    lines += [
        "",
        f"Bar: within 2 % of the formats. {facts['layers']} linear layers of {facts['width']} x "
        f"{facts['width']}, after two steps. {_taken(results, 'memory')}",
    ]
    return "\n".join(lines), holds


# ------------------------------------------------------------------------- exchange

REPLICA_STEPS = 200


def exchange(results: Results, *, quick: bool) -> None:
    from nbaccel import notebook_launcher

    results.forget("exchange")
    for kind, ranks in fp8_memory.rows():
        for name, error in fp8_memory.errors(kind, ranks).items():
            results.of(f"exchange {kind} {ranks}", name).values.append(error)
    for count in (2, 3):
        say(f"replicas in {count} processes")
        steps = 5 if quick else REPLICA_STEPS
        found = notebook_launcher(
            fp8_memory.replicas, (steps,), count, start_method="template", timeout=1200
        )
        results.of("exchange replicas", str(count)).facts.append({"steps": steps, **found[0]})
    results.note("exchange", values=fp8_memory.VALUES)
    results.save()


def exchange_table(results: Results) -> tuple[str, bool]:
    ways = ("two shots", "a sum in E4M3", "a ring in bf16")
    lines = [
        f"| gradients | ranks | {' | '.join(ways)} | bar |",
        "| --- | --: | --: | --: | --: | --- |",
    ]
    holds = True
    for kind, ranks in fp8_memory.rows():
        found = [results.of(f"exchange {kind} {ranks}", way).values[0] for way in ways]
        good = found[0] <= 0.05
        holds &= good
        cells = " | ".join(f"{error:.3f}" for error in found)
        lines.append(f"| {kind} | {ranks} | {cells} | {verdict(good)} |")
    lines += ["", "| processes | steps | replicas equal after | bytes sent, to bf16 | bar |"]
    lines.append("| --: | --: | --: | --: | --- |")
    for count in ("2", "3"):
        facts = results.of("exchange replicas", count).facts[0]
        good = facts["equal"] == facts["steps"] and facts["sent to bf16"] < 0.55
        holds &= good
        lines.append(
            f"| {count} | {facts['steps']} | {facts['equal']} | {facts['sent to bf16']:.2f}x | "
            f"{verdict(good)} |"
        )
    lines += [
        "",
        "Bars: an error of at most 0.05 at any number of ranks; replicas equal after every step; "
        f"at most 0.55 of the bytes. {_taken(results, 'exchange')}",
    ]
    return "\n".join(lines), holds


# ------------------------------------------------------------------------- a GPU


def gpu(results: Results, *, quick: bool) -> None:
    import torch

    has_gpu = torch.cuda.is_available()
    if not (has_gpu or quick):
        say("no GPU here: speed and memory beside bf16 are measured by `make gpu` on one")
        return
    results.forget("gpu")
    name = torch.cuda.get_device_name() if has_gpu else "No GPU: this only shows that it runs"
    modes = fp8_gpu.MODES[quick]
    results.note("gpu", gpu=name, **{mode.name: mode.title for mode in modes})
    for way in fp8_gpu.WAYS:
        for mode in modes:
            say(f"on the GPU: {way}, {mode.name}")
            tokens = results.of(f"gpu tokens, {mode.name}", way)
            try:
                found = fp8_gpu.measure_in_worker(way, mode, "cuda" if has_gpu else "cpu")
            except Exception as error:  # a library that is missing or fails is a cell of the table
                tokens.errors.append(f"{type(error).__name__}: {error}"[:600])
                say(tokens.errors[-1].splitlines()[0])
            else:
                tokens.values.append(found["tokens_per_s"])
                results.of(f"gpu memory, {mode.name}", way).values.append(found["peak_bytes"])
            # Of a machine that is lent, what there is so far may be all.
            results.save()


def gpu_table(results: Results) -> tuple[str, bool]:
    facts = results.sections["gpu"]
    modes = ("eager", "compiled")
    heads = [f"{facts[mode]}: tokens/s, to bf16 | GiB" for mode in modes]
    lines = [f"| | {' | '.join(heads)} |", "| --- | --: | --: | --: | --: |"]
    for way in fp8_gpu.WAYS:
        cells = " | ".join(_gpu_cells(results, way, mode) for mode in modes)
        lines.append(f"| {way} | {cells} |")
    lines += ["", "`-`: not measured, or its library is not there."]
    lines += [f"{fp8_gpu.ENGINE_ALONE}, is not compiled. {facts['gpu']}. {_taken(results, 'gpu')}"]
    return "\n".join(lines), True


def _gpu_cells(results: Results, way: str, mode: str) -> str:
    tokens = results.median(f"gpu tokens, {mode}", way)
    peak = results.median(f"gpu memory, {mode}", way)
    reference = results.median(f"gpu tokens, {mode}", "bf16")
    if tokens is None or peak is None:
        return "- | -"
    compared = f" ({tokens / reference:.2f}x)" if reference else ""
    return f"{tokens / 1000:,.1f}k{compared} | {peak / 2**30:.2f}"


# ------------------------------------------------------------------------- all of it


MEASURED = {"loss": losses, "memory": memory, "exchange": exchange, "gpu": gpu}
TABLES = {
    "loss": ("Losses", loss_table),
    "memory": ("Memory", memory_table),
    "exchange": ("Exchange of gradients", exchange_table),
    "gpu": ("On a GPU", gpu_table),
}
WITHOUT_A_GPU = ("loss", "memory", "exchange")


def _taken(results: Results, section: str) -> str:
    facts = results.sections[section]
    return (
        f"Taken {facts['taken']}; load {facts['load']}; {facts['num_cores']} cores, "
        f"{facts['memory_gib']} GiB; {versions(facts, PACKAGES)}."
    )


def render(results: Results) -> tuple[str, bool]:
    parts, holds = [], True
    for name, (title, make) in TABLES.items():
        if name in results.sections:
            text, good = make(results)
            parts.append(f"**{title}**\n\n{text}")
            holds &= good
    return "\n\n".join(parts) or "Nothing has been measured yet.", holds


REPORT = Report("fp8", render, mark="fp8")


def main() -> int:
    parser = REPORT.parser(__doc__)
    parser.add_argument("--sections", nargs="+", choices=MEASURED, default=WITHOUT_A_GPU)
    parser.add_argument("--quick", action="store_true", help="few steps, small tensors")
    options = parser.parse_args()

    def take(results: Results) -> None:
        for name in options.sections:
            MEASURED[name](results, quick=options.quick)

    return REPORT.run(options, take)


if __name__ == "__main__":
    sys.exit(main())
