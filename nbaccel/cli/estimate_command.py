"""``nbaccel estimate-memory MODEL``: what a model takes, loaded and trained."""

from __future__ import annotations

from typing import Annotated

import typer

_ESTIMATE_HELP = (
    "Estimate the memory of a model on this disk: a folder with a transformers config.json (built "
    "without weights), or a file or folder of safetensors (only headers are read). gpt2, llama and "
    "other kinds of models of transformers have their default size. The second table has the "
    "ways to train with Adam; activations depend on the batch and are not in it."
)


def add_to(app: typer.Typer) -> None:
    """Add the subcommand."""
    app.command(
        "estimate-memory",
        help=_ESTIMATE_HELP,
        short_help="what a model takes, loaded and trained",
        # Accelerate takes several words after --dtypes.
        context_settings={"allow_extra_args": True},
    )(_estimate)


def _estimate(
    context: typer.Context,
    model_path: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder or file of a model, or gpt2, llama, ..."),
    ],
    dtypes: Annotated[
        str,
        typer.Option(
            "--dtypes",
            metavar="WORDS",
            help="Formats of the first table: float32, float16, bfloat16, fp8, int8, int4.",
        ),
    ] = "float32,bfloat16,int8,int4",
    num_gpus: Annotated[
        int, typer.Option("--num-gpus", metavar="N", min=1, help="Devices of each machine.")
    ] = 1,
    num_nodes: Annotated[
        int, typer.Option("--num-nodes", metavar="N", min=1, help="Machines.")
    ] = 1,
    mixed_precision: Annotated[
        str,
        typer.Option(
            "--mixed-precision", metavar="WORD", help="no, fp16, bf16 or fp8, of the second table."
        ),
    ] = "no",
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="Run the model's own code, where its folder has some."
        ),
    ] = False,
    library_name: Annotated[
        str,
        typer.Option("--library-name", metavar="WORD", help="transformers; no other is known."),
    ] = "transformers",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    # Here, so that `nbaccel --help` does not import torch.
    from nbaccel.cli.memory_tables import print_estimate

    print_estimate(
        model_path,
        dtypes=[*dtypes.replace(",", " ").split(), *context.args],
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        mixed_precision=mixed_precision,
        trust_remote_code=trust_remote_code,
        library_name=library_name,
        as_json=as_json,
    )
