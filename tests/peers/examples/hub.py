"""What Accelerate's examples fetch from the hub, tiny and random, in a folder.

`from_pretrained`, `load_dataset` and `evaluate.load` look for a folder of the name they are given
before they ask the hub. So an example that runs with such a folder as its working directory runs
as it stands, with the real `transformers`, `datasets` and `evaluate`, and fetches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

__all__ = ["build"]

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(28))]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}
NUM_TRAINED, NUM_EVALUATED = 40, 37
METRIC = """\
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        whole = datasets.Value("int64")
        features = datasets.Features({"predictions": whole, "references": whole})
        return evaluate.MetricInfo(
            description="", citation="", inputs_description="", features=features
        )

    def _compute(self, predictions, references):
        right = sum(int(p == r) for p, r in zip(predictions, references))
        both = sum(int(p and r) for p, r in zip(predictions, references))
        return {
            "accuracy": right / len(references),
            "f1": 2 * both / max(1, sum(predictions) + sum(references)),
            "count": len(references),
        }
"""


def build(folder: Path) -> None:
    """Write models, tokenizers, datasets and the metric.

    Args:
        folder: Where to; it becomes the examples' working directory.
    """
    torch.manual_seed(0)
    bert, llama = folder / "bert-base-cased", folder / "HuggingFaceTB" / "SmolLM-360M"
    BertForSequenceClassification(BertConfig(**SIZES)).save_pretrained(bert)
    _tokenizer(pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]").save_pretrained(bert)
    LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **SIZES)).save_pretrained(llama)
    _tokenizer(eos_token="[SEP]").save_pretrained(llama)
    _dataset(
        folder / "nyu-mll" / "glue",
        "mrpc",
        train=[_pair(n, 1) for n in range(NUM_TRAINED)],
        validation=[_pair(n, 2) for n in range(NUM_EVALUATED)],
    )
    _dataset(
        folder / "Salesforce" / "wikitext",
        "wikitext-2-v1",
        train=[{"text": _sentence(n, 3) if n % 3 else ""} for n in range(500)],
        validation=[{"text": _sentence(n, 4)} for n in range(40)],
    )
    (folder / "glue").mkdir()
    (folder / "glue" / "glue.py").write_text(METRIC)


def _tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=64, unk_token="[UNK]", **special
    )


def _sentence(number: int, step: int) -> str:
    return " ".join(f"w{(number * k + step) % 28}" for k in range(1, 3 + number % 6))


def _pair(number: int, step: int) -> dict[str, Any]:
    first, second = _sentence(number, step), _sentence(number + 1, step)
    return {"sentence1": first, "sentence2": second, "label": number % 2, "idx": number}


def _dataset(folder: Path, config: str, **splits: Iterable[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in splits)
    card = f"---\nconfigs:\n- config_name: {config}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card)
