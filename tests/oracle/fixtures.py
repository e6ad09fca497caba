"""Reads the oracle fixtures: small checkpoints in the released format with outputs of a public implementation.

`tiny` is committed beside this file; `geometry` (real kernel widths, larger) lies in an oracle folder next to the
checkout where there is one, and its tests are skipped otherwise.
"""

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deepinfer.model.reference import Numerics, Reference, Sources
from deepinfer.model.reference_io import ReferenceConfig, load_checkpoint
from deepinfer.model.reference_ops import ids_to_mask

HERE = Path(__file__).parent
CASES = ("tiny", "geometry")


@dataclasses.dataclass(frozen=True)
class OracleCase:
    """One fixture. expected: its tensors by name; all without a batch axis."""

    folder: Path
    config: ReferenceConfig
    weights: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]

    @property
    def ids(self) -> torch.Tensor:
        """int64 [1, T]"""
        return self.expected["input_ids"][None]

    def reference(self, numerics: Numerics | None = None, **config_changes) -> Reference:
        """The reference network on this checkpoint, with the oracle's token map and changes to the configuration."""
        config = dataclasses.replace(self.config, **config_changes)
        return Reference(config, dict(self.weights), numerics, self.expected["engram.token_map"])

    def sources_before(self, layer: int) -> Sources:
        """What `layer` reads from earlier source layers, from the expected tensors."""
        config, found = self.config, {}

        def nearest(layers):
            return max((one for one in layers if one < layer), default=None)

        kv, index = nearest(config.kv_source_layer_ids), nearest(config.index_source_layer_ids)
        if kv is not None:
            found["compressed"] = self.expected[f"compressed_kv.{kv}"][None]
            found["index_keys"] = self.expected[f"index_keys.{nearest(config.index_k_source_layer_ids)}"][None]
            rows = found["compressed"].shape[1]
            found["select"] = ids_to_mask(self.expected[f"select.{index}"][None], rows)
        pool = config.candidate_source_layer_id
        if pool is not None and pool < layer:
            found["candidates"] = self.expected[f"candidates.{pool}"][None].bool()
        return Sources(**found)


@functools.cache
def _read(folder: Path) -> OracleCase:
    config, weights = load_checkpoint(folder)
    return OracleCase(folder, config, weights, load_file(folder / "expected.safetensors"))


def find_folder(name: str) -> Path | None:
    """The fixture's folder: beside this file, or in an oracle folder of a neighbour of the checkout."""
    beside = HERE.parents[1].parent.glob(f"*/oracle/{name}")
    return next((folder for folder in (HERE / name, *sorted(beside)) if (folder / "config.json").exists()), None)


def open_case(name: str) -> OracleCase:
    """The fixture; skips the calling test, with the reason, when it is not on this machine."""
    folder = find_folder(name)
    if folder is None:
        pytest.skip(f"oracle fixture {name!r} is not here: no */oracle/{name} next to the checkout")
    return _read(folder)


def row_difference(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[T] largest absolute difference of each row."""
    return (actual.float() - expected.float()).abs().flatten(1).amax(1)


def share_of_rows_that_agree(case: OracleCase, logits: torch.Tensor) -> float:
    """Share of positions whose rounded-cache logits lie within 1e-4 + 4 * noise_spread of the oracle's."""
    allowed = 1e-4 + 4 * case.expected["noise_spread"]
    return (row_difference(logits, case.expected["logits"]) <= allowed).float().mean().item()
