"""A runner without a model: the next token is a hash of the sequence's history, read from a device-like token store.

It keeps its own history and its own copy of which tokens were written to which block, so a scheduler that reuses memory
too early, skips a token or plans a wrong position gives other tokens, or an error here.
"""

from dataclasses import dataclass, field

import numpy as np

from deepinfer.config import EngineConfig
from deepinfer.engine.build import assemble

BLOCK = 128


def next_token(history, vocab_size, seed=0):
    """The deterministic next token after `history` (ids so far); a seed stands for sampling noise."""
    state = 1469598103934665603 ^ (seed & 0xFFFFFFFF)
    for token in list(history)[-8:]:
        state = ((state ^ (int(token) + 1)) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    state ^= len(history) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
    return (state >> 20) % vocab_size


@dataclass
class FakeResult:
    tokens: np.ndarray
    nan_flags: np.ndarray
    logprobs: tuple | None = None
    prompt_logprobs: tuple | None = None


@dataclass
class FakeRunner:
    """choose(history, seed) overrides the next token; flag(sequence, position) is its NaN flag."""

    num_blocks: int = 64
    num_slots: int = 8
    max_model_len: int = 2048
    vocab_size: int = 64
    choose: object = None
    before_launch: object = None
    before_settle: object = None
    flag: object = None
    check: bool = True
    launches: list = field(default_factory=list)

    def __post_init__(self):
        self.history = np.full((self.num_slots, self.max_model_len + 8), -1, np.int32)
        self.stored = np.full((self.num_blocks, BLOCK), -1, np.int32)

    def launch(self, plan):
        if self.before_launch:
            self.before_launch(plan)
        for slot, start, ids in plan.new_tokens:
            self.history[slot, start : start + len(ids)] = ids
        if self.check:
            self._check_and_store(plan)
            self.launches.append((plan.num_tokens, len(plan.sampled)))
        slots = plan.slots[plan.sample_requests]
        tokens = np.zeros(len(slots), np.int32)
        if self.choose == "fast":
            tokens[:] = (self.history[slots, plan.positions_out - 1] * 31 + plan.positions_out) % self.vocab_size
        else:
            for row, (slot, position) in enumerate(zip(slots, plan.positions_out, strict=True)):
                drawn = plan.sampling.temperature[row] > 0
                past, seed = self.history[slot, :position], int(plan.sampling.seeds[row]) if drawn else 0
                pick = self.choose or (lambda past, seed: next_token(past, self.vocab_size, seed))
                tokens[row] = pick(past, seed)
        self.history[slots, plan.positions_out] = tokens
        flags = np.zeros(len(slots), np.uint8)
        if self.flag:
            flags[:] = [self.flag(s, int(p)) for s, p in zip(plan.sampled, plan.positions_out, strict=True)]
        return FakeResult(tokens, flags, self._logprobs(plan, tokens), self._prompt_logprobs(plan))

    def settle(self, handle):
        if self.before_settle:
            self.before_settle(handle)
        return handle

    def score(self, ids):
        return np.log(np.full((len(ids), self.vocab_size), 1 / self.vocab_size, np.float32))

    def _check_and_store(self, plan):
        """Every earlier token of a sequence must lie in its blocks; then the step's own tokens are stored."""
        assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot is planned twice"
        used = plan.block_tables[plan.block_tables >= 0]
        assert len(set(used.tolist())) == len(used), "two sequences share a block"
        for row, slot in enumerate(plan.slots):
            start, count = int(plan.starts[row]), int(plan.cu_q[row + 1] - plan.cu_q[row])
            past = np.arange(start)
            table = plan.block_tables[row]
            assert (self.stored[table[past // BLOCK], past % BLOCK] == self.history[slot, :start]).all(), "stale cache"
            now = np.arange(start, start + count)
            assert (table[now // BLOCK] >= 0).all(), "no block for a planned token"
            assert (self.history[slot, now] >= 0).all(), "a planned token is unknown"
            self.stored[table[now // BLOCK], now % BLOCK] = self.history[slot, now]

    def _logprobs(self, plan, tokens):
        k = plan.sampling.num_logprobs
        return None if k < 0 else self._table(tokens, k)

    def _prompt_logprobs(self, plan):
        return self._table(plan.logit_targets, plan.num_prompt_logprobs) if len(plan.logit_rows) else None

    def _table(self, tokens, k):
        n = len(tokens)
        ids = np.broadcast_to(np.arange(k, dtype=np.int32), (n, k))
        values = np.broadcast_to(-np.arange(1, k + 1, dtype=np.float32), (n, k))
        return -(1 + np.asarray(tokens, np.float32)), np.asarray(tokens) + 1, ids, values


def make_engine(
    tokenizer=None, end_ids=frozenset(), overlap=False, seed=0, max_num_batched_tokens=256, chunked=True, **runner
):
    """An engine around a FakeRunner."""
    fake = FakeRunner(**runner)
    config = EngineConfig.create(
        model="fake",
        max_num_seqs=fake.num_slots,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_chunked_prefill=chunked,
        max_model_len=fake.max_model_len,
        seed=seed,
    )
    return assemble(config, fake, tokenizer, end_ids, overlap)


def run_all(engine, limit=100_000):
    """Steps until idle; final outputs by request id. Fails instead of running forever."""
    finished = {}
    for _ in range(limit):
        if not engine.has_unfinished:
            engine.check_idle()
            return finished
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
    raise AssertionError("the engine did not come to an end")


def expected_tokens(prompt, count, vocab_size, seed=0):
    """What a sequence alone gives."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, vocab_size, seed))
    return ids[len(prompt) :]
