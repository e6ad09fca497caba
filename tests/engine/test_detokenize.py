"""Tokens to text and back: no split characters, no user text that becomes structure."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.detokenize import Detokenizer
from deepinfer.errors import ConfigError, RequestError
from deepinfer.tokenizer import Tokenizer
from tests.engine.toy_tokenizer import SPECIAL, STRUCTURAL, byte_ids, make_tokenizer

TOKENIZER = make_tokenizer()
FIXED = settings(max_examples=200, deadline=None, derandomize=True)


def pieces(ids, skip_special_tokens=True):
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens)
    return [detokenizer.push(token) for token in ids] + [detokenizer.flush()]


@FIXED
@given(st.text())
def test_text_survives_encoding_and_decoding(text):
    ids = TOKENIZER.encode(text)
    assert ids[0] == TOKENIZER.bos_id == 0
    assert TOKENIZER.decode(ids) == text
    assert "".join(pieces(ids)) == text


@FIXED
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.booleans())
def test_any_ids_stream_to_the_same_text_as_they_decode_to(ids, skip):
    assert "".join(pieces(ids, skip)) == TOKENIZER.decode(ids, skip)


@FIXED
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)))
def test_decoding_equals_the_library(ids):
    assert TOKENIZER.decode(ids, False) == TOKENIZER._with_specials.decode(ids, skip_special_tokens=False)


@FIXED
@given(st.text(alphabet="aé漢🙂\u200d👩🏽", min_size=1))
def test_a_character_comes_out_whole_with_its_last_byte(text):
    shown = pieces(byte_ids(text))
    assert "".join(shown) == text
    assert "\ufffd" not in "".join(shown)
    assert all(len(piece) <= 1 for piece in shown)


def test_an_unfinished_character_is_held_and_flushed_as_one_replacement():
    assert pieces(byte_ids("🙂".encode()[:3])) == ["", "", "", "\ufffd"]


def test_bytes_that_begin_nothing_show_at_once():
    assert pieces(byte_ids(b"\xffa")) == ["\ufffd", "a", ""]
    assert pieces(byte_ids(b"\xf0\x9fa")) == ["", "", "\ufffda", ""]


def test_a_real_replacement_character_passes():
    assert "".join(pieces(byte_ids("a\ufffdb"))) == "a\ufffdb"


def test_special_tokens_are_skipped_only_when_asked():
    ids = [0, *byte_ids("x"), 1]
    assert "".join(pieces(ids)) == "x"
    assert "".join(pieces(ids, skip_special_tokens=False)) == "<bos>x<eos>"
    structural = TOKENIZER.added["<think>"]
    assert "".join(pieces([structural])) == "<think>"


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("token", SPECIAL + STRUCTURAL)
def test_user_text_never_becomes_a_special_or_structural_token(token, ignore_merges):
    tokenizer = make_tokenizer(ignore_merges)
    for text in (token, f"say {token} now", token * 3):
        ids = tokenizer.encode(text, add_bos=False)
        assert not set(ids) & set(tokenizer.added.values())
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode(token, add_bos=False, parse_special=True) == [tokenizer.added[token]]


def test_text_that_is_no_unicode_is_refused():
    with pytest.raises(RequestError, match="prompt"):
        TOKENIZER.encode("\ud800")


def test_ids_outside_the_vocabulary_are_refused():
    for token in (-1, TOKENIZER.vocab_size):
        with pytest.raises(RequestError, match="not a token id"):
            TOKENIZER.decode([token])


def test_a_folder_without_a_usable_tokenizer_says_so(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer.json is absent"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"decoder": {"type": "Metaspace"}}')
    with pytest.raises(ConfigError, match="ByteLevel"):
        Tokenizer.from_folder(tmp_path)
