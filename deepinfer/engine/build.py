"""From an EngineConfig to an engine that is ready for requests."""

from __future__ import annotations

from deepinfer.config import EngineConfig
from deepinfer.engine.loop import EngineCore
from deepinfer.engine.scheduler import Scheduler
from deepinfer.engine.step_plan import StepRunner
from deepinfer.errors import ConfigError
from deepinfer.tokenizer import Tokenizer


def build_engine(config: EngineConfig) -> EngineCore:
    """Loads the model and joins runner, scheduler and tokenizer. Raises the errors of loading, all DeepInferError."""
    from deepinfer.runner.runner import Runner  # loading torch and a backend is for those who run a model

    runner = Runner.from_config(config)
    runner.warm_up()
    checkpoint = runner.loaded.checkpoint
    tokenizer = Tokenizer.from_folder(checkpoint.folder) if (checkpoint.folder / "tokenizer.json").is_file() else None
    overlap = not runner.synchronous if config.overlap is None else config.overlap
    return assemble(config, runner, tokenizer, frozenset(checkpoint.config.eos_token_ids), overlap)


def assemble(
    config: EngineConfig,
    runner: StepRunner,
    tokenizer: Tokenizer | None,
    end_ids: frozenset[int],
    overlap: bool,
) -> EngineCore:
    """An engine around a runner that is at hand."""
    if tokenizer is not None and tokenizer.vocab_size > runner.vocab_size:
        raise ConfigError(
            "tokenizer", f"has {tokenizer.vocab_size} ids, the model {runner.vocab_size}: they do not belong together"
        )
    if tokenizer is not None and tokenizer.eos_id is not None:
        end_ids |= {tokenizer.eos_id}
    scheduler = Scheduler(
        num_blocks=runner.num_blocks,
        num_slots=min(runner.num_slots, config.max_num_seqs),
        max_model_len=runner.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        block_tokens=config.block_size,
    )
    return EngineCore(config, scheduler, runner, tokenizer, end_ids, overlap)
