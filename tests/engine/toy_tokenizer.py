"""A byte-level BPE made by hand: 0..2 special, 3..258 bytes, merges, then structural tokens that are not special."""

import json

from deepinfer.tokenizer import _ALPHABET, Tokenizer

SPECIAL = ["<bos>", "<eos>", "<pad>"]
STRUCTURAL = ["<think>", "<|im_end|>", "｜User｜", "USER"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("t", "he")]


def make_tokenizer(ignore_merges=False):
    """Byte b is id 3 + b."""
    vocab = {token: i for i, token in enumerate(SPECIAL)}
    vocab |= {char: 3 + byte for char, byte in _ALPHABET.items()}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    added = [(token, i, True) for i, token in enumerate(SPECIAL)]
    for token in STRUCTURAL:
        added.append((token, len(vocab), False))
        vocab[token] = len(vocab)
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": t, "special": s, **flags} for t, i, s in added],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": vocab,
            "merges": [f"{left} {right}" for left, right in MERGES],
        },
    }
    return Tokenizer(json.dumps(spec), {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}})


def byte_ids(text):
    """One id per byte of `text` (str or bytes)."""
    return [3 + byte for byte in (text.encode() if isinstance(text, str) else text)]
