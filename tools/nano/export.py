"""Writes a checkpoint folder in the released layout: config, tokenizer, quantised shards and their index."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from config import MAX_CHECKPOINT_BYTES, tensor_table
from safetensors.torch import load_file, save_file
from storage import stored_tensors

SHARDS = 2


def read_stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder in their on-disk form."""
    shards = [load_file(file) for file in sorted(folder.glob("model-*.safetensors"))]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def export_checkpoint(folder: Path, config: dict, masters: dict[str, torch.Tensor], tokenizer_folder: Path,
                      stored_already: dict[str, torch.Tensor] | None = None) -> int:
    """Writes everything but the model card into `folder`; returns the bytes written.

    stored_already: tensors in their on-disk form to take as they are, by name, scales too. Raises ValueError when the
    result is over the size limit (the files stay, for inspection).
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = stored_tensors(masters, tensor_table(config)) | (stored_already or {})
    total = sum(t.numel() * t.element_size() for t in stored.values())
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in stored.items():
        size = tensor.numel() * tensor.element_size()
        if filled + size > -(-total // SHARDS) and len(shards) < SHARDS:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, separators=(",", ":")))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(tokenizer_folder) / name, folder / name)
    written = sum(path.stat().st_size for path in folder.iterdir())
    if written > MAX_CHECKPOINT_BYTES:
        raise ValueError(f"{folder} holds {written} bytes; a checkpoint may have {MAX_CHECKPOINT_BYTES}")
    return written
