"""nano for tests: the trained checkpoint that ships with the package, and one of its shape with random weights.

Random weights route, select and mix harder than trained ones, and none of their gains, sinks or biases has a value that
a forgotten tensor would have too.
"""

import contextlib
import functools
import math
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer.config import EngineConfig
from deepinfer.model.reference import Numerics, Reference
from deepinfer.runner.runner import Runner

ROOT = Path(__file__).parents[2]
TRAINED = ROOT / "deepinfer" / "models" / "nano"
TOOLS = ROOT / "tools" / "nano"
MODELS = ("random", "trained")
RANDOM = {"random": 1.0, "calm": 0.1}
_KEEP = []  # temporary folders, held until the tests end


@contextlib.contextmanager
def nano_tools():
    """tools/nano on the import path: its scripts import one another by bare names."""
    sys.path.insert(0, str(TOOLS))
    try:
        yield
    finally:
        sys.path.remove(str(TOOLS))


@functools.cache
def nano_folder(name: str) -> Path:
    """Folder of the `random`, `calm` or `trained` checkpoint; skips the calling test when the trained one is not there.

    calm: random, with sub-layer outputs a tenth as large, so that one flipped code does not change everything after it.
    """
    if name in RANDOM:
        keep = tempfile.TemporaryDirectory(prefix=f"nano-{name}-")
        _KEEP.append(keep)
        write_random_nano(Path(keep.name), output_scale=RANDOM[name])
        return Path(keep.name)
    if not (TRAINED / "config.json").is_file():
        pytest.skip(f"no trained nano at {TRAINED.relative_to(ROOT)}")
    return TRAINED


def write_random_nano(folder: Path, seed: int = 11, output_scale: float = 1.0) -> None:
    """A checkpoint in the released format, with nano's shapes. output_scale: of what attention and experts give out."""
    with nano_tools():
        from config import config_json
        from export import export_checkpoint
        from init import init_weights

        from deepinfer.model.engram_vocab import engram_token_map

        tokenizer = _tokenizer_folder(folder)
        token_map = engram_token_map(tokenizer / "tokenizer.json", 2048)
        config = config_json(int(token_map.max()) + 1)
        export_checkpoint(folder, config, _harden(init_weights(config, seed), seed + 1, output_scale), tokenizer)


def _tokenizer_folder(folder: Path) -> Path:
    """The trained tokenizer, or until there is one a tokenizer of the same size from some of the standard library."""
    if (TRAINED / "tokenizer.json").is_file():
        return TRAINED
    import tokenizer as nano_tokenizer

    made = folder / "tokenizer"
    made.mkdir()
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:80]
    nano_tokenizer.save(nano_tokenizer.train(path.read_text("utf-8") for path in sources), made)
    return made


def _harden(weights: dict[str, torch.Tensor], seed: int, output_scale: float) -> dict[str, torch.Tensor]:
    """Starting weights are near a plain residual network; these make every tensor count."""
    generator = torch.Generator().manual_seed(seed)

    def normal(like: torch.Tensor, std: float) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator) * std

    hardened = {}
    for name, weight in weights.items():
        if "norm.weight" in name or name.endswith(("q_weight", "k_weight")):
            weight = weight + normal(weight, 0.3)
        elif name.endswith("attn_sink"):
            weight = normal(weight, 1.0)
        elif name.endswith(("gate.bias", "gate.bias_vl")):
            weight = normal(weight, 0.2)
        elif name.endswith("_scale"):
            weight = weight + normal(weight, 0.05)
        elif name.endswith("wo_b.weight") or ".w2." in name:
            weight = normal(weight, output_scale / math.sqrt(weight.shape[1]))
        elif name.endswith("head.weight"):
            weight = normal(weight, 1.0 / math.sqrt(weight.shape[1]))
        elif name.endswith("confidence_head.proj.weight"):
            weight = normal(weight, 0.1)
        hardened[name] = weight
    return hardened


@functools.cache
def nano_text(name: str, tokens: int = 300, seed: int = 0) -> np.ndarray:
    """int32 [tokens], from the begin token on: a fixed English text for `trained`, ids at random for the others.

    seed: another stretch. Structural tokens (image, chat, noise) are left out.
    """
    if name in RANDOM:
        ids = np.random.default_rng(100 + seed).integers(3, 2030, tokens)
    else:
        from deepinfer.tokenizer import Tokenizer

        whole = Tokenizer.from_folder(nano_folder(name)).encode((ROOT / "LICENSE").read_text("utf-8"), add_bos=False)
        ids = np.array(whole[seed * 350 :][:tokens])
    ids[0] = 0
    return ids.astype(np.int32)


def nano_runner(name: str, with_draft: bool = True, **settings) -> Runner:
    """A runner of the checkpoint; settings are fields of EngineConfig."""
    sizes = {"max_model_len": 640, "max_num_seqs": 8, "max_num_batched_tokens": 1024, "num_blocks": 48}
    config = EngineConfig.create(model=str(nano_folder(name)), backend="cpu", **(sizes | settings))
    return Runner.from_config(config, with_draft=with_draft)


@functools.cache
def nano_reference(name: str, act_quant: str, kv: str, dtype: torch.dtype = torch.float32) -> Reference:
    """The reference network on the checkpoint."""
    return Reference.from_folder(nano_folder(name), Numerics(act_quant, kv, dtype))


def reference_logits(net: Reference, ids: np.ndarray) -> torch.Tensor:
    """float32 [T, V]"""
    with torch.no_grad():
        return net.forward(torch.from_numpy(ids.astype(np.int64))[None], taps={}, wanted=set())[0]
