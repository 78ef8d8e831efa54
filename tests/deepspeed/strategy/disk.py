"""A process without a launcher that prepares an engine with parts on disk, and just ends.

Run as a module, with a folder and the class of layers to fetch together, it tells whether an engine
was refused, and how many hold a folder.
"""

from __future__ import annotations

import json
import sys

import torch

from nbaccel import Accelerator, DeepSpeedPlugin
from nbaccel.deepspeed.strategy import local_shards
from tests.deepspeed.programs import refusal
from tests.deepspeed.strategy.test_disk import net, swapped_to


def main(folder: str, layers: str) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=swapped_to(folder), transformer_moe_cls_names=layers)
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision="bf16", cpu=True)
    model = net()
    refused = refusal(accelerator.prepare, model, torch.optim.AdamW(model.parameters()))
    print(json.dumps({"refused": refused, "claims": len(local_shards._OPEN_CLAIMS)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
