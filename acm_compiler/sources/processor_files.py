"""What prepares a transformers model's inputs: the files of tokenizers and processors that lie beside it."""

from __future__ import annotations

from pathlib import Path

from acm_compiler.recipe.load import installed_path
from acm_compiler.recipe.models import ModelConfig

PROCESSOR_FILES = frozenset(
    (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt"),
        *("vocab.json", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "tokenizer.model", "source.spm"),
        *("target.spm", "preprocessor_config.json", "processor_config.json", "chat_template.jinja"),
    )
)


def processor_files(config: ModelConfig) -> dict[str, bytes]:
    """The files in the folder of an `hf:` model that `pipeline()` needs beside the weights; by name."""
    folder = Path(installed_path(config.name)) if config.source == "hf" else None
    if folder is None or not folder.is_dir():
        return {}
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name in PROCESSOR_FILES}
