"""nano's tokenizer: byte-level BPE, 2048 ids, trained on the training split only.

Ids: 0 begin, 1 end, 2 padding, 3..2029 bytes and merges, 2030 image, 2031..2046 the chat specials of
deepseek-recipe's defaults, 2047 the draft block's noise token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
BOS, EOS, PAD, IMAGE, NOISE = 0, 1, 2, 2030, 2047
# The spellings are deepseek-recipe's defaults; padding, the unused ids and noise are this checkpoint's own.
SPECIALS = {
    "<｜begin▁of▁sentence｜>": BOS, "<｜end▁of▁sentence｜>": EOS, "<｜▁pad▁｜>": PAD, "<｜image｜>": IMAGE,
    "<think>": 2031, "</think>": 2032, "<｜System｜>": 2033, "<｜User｜>": 2034, "<｜Assistant｜>": 2035,
    "<｜latest_reminder｜>": 2036, "｜DSML｜": 2037, "<｜ref｜>": 2038, "<｜/ref｜>": 2039, "<｜box｜>": 2040,
    "<｜/box｜>": 2041, "<｜point｜>": 2042, "<｜/point｜>": 2043, "<｜polygon｜>": 2044, "<｜/polygon｜>": 2045,
    "<｜place▁holder▁no▁0｜>": 2046, "<｜noise｜>": NOISE,
}
# Line breaks keep their indentation; a word takes the blank before it; digits go singly; marks clump.
SPLIT = r"[\r\n]+[ \t]*| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|[ \t]+|\s+"


def _pipeline(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of exactly 2048 ids from training texts; merges fill what bytes and specials leave free."""
    ordinary = VOCAB_SIZE - len(SPECIALS)
    learner = _pipeline(models.BPE())
    learner.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=ordinary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), max_token_length=24,
        show_progress=False, special_tokens=[]))
    model = json.loads(learner.to_str())["model"]
    spellings = sorted(model["vocab"], key=model["vocab"].get)
    if len(spellings) != ordinary:
        raise ValueError(f"training text gave {len(spellings)} byte and merge tokens, {ordinary} are needed")
    vocab = {spelling: 3 + rank for rank, spelling in enumerate(spellings)} | SPECIALS
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    document = json.loads(_pipeline(models.BPE(vocab=vocab, merges=merges)).to_str())
    document["added_tokens"] = [
        {"id": number, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True} for text, number in sorted(SPECIALS.items(), key=lambda kv: kv[1])]
    return Tokenizer.from_str(json.dumps(document, ensure_ascii=False))


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json."""
    document = json.loads(tokenizer.to_str())
    (folder / "tokenizer.json").write_text(
        json.dumps(document, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    names = {number: text for text, number in SPECIALS.items()}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 1048576, "add_bos_token": False,
        "add_eos_token": False, "clean_up_tokenization_spaces": False, "bos_token": names[BOS],
        "eos_token": names[EOS], "pad_token": names[PAD],
        "added_tokens_decoder": {str(number): {"content": names[number], "special": True} for number in sorted(names)},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), encoding="utf-8")
