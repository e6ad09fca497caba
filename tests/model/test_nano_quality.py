"""The packaged nano, through the engine with default numerics: a fast part of what tools/nano/measure.py shows."""

import functools

import pytest

from tests.model.nano_models import nano_folder, nano_tools

PATHS = 3
DRAFTS = 200


@functools.cache
def report():
    """Measures the three smallest held-out files of at least 8 000 bytes."""
    folder = nano_folder("trained")
    with nano_tools():
        import corpus
        import measure

        from deepinfer.tokenizer import Tokenizer

        try:
            documents = measure.held_out_documents()
        except corpus.CorpusError as error:
            pytest.skip(f"the held-out files are those of another Python: {error}")
        documents = sorted((d for d in documents if len(d.data) >= 8_000), key=lambda d: len(d.data))[:PATHS]
        files = measure.encode(documents, Tokenizer.from_folder(folder))
        found = measure.measure(measure.open_runner(str(folder), files, None), files, DRAFTS)
        return measure.quality(files, documents, found)


def test_held_out_text_costs_at_most_nine_tenths_of_xz():
    assert report()["bits_per_byte"] <= 0.9 * report()["xz_9e_bits_per_byte"]


def test_every_byte_of_the_files_is_counted():
    assert report()["files"] == PATHS
    assert report()["bytes"] >= PATHS * 8_000


def test_at_least_1_5_of_5_drafts_are_accepted():
    assert report()["drafts"] >= DRAFTS * 0.8
    assert report()["mean_accepted"] >= 1.5


def test_confidence_foretells_acceptance():
    assert report()["confidence_auc"] >= 0.70
    assert report()["confidence_ece_15_bins"] <= 0.12  # a few hundred blocks fill 15 bins thinly; the bar is on 5 000


def test_the_checkpoint_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in nano_folder("trained").iterdir()) <= 16_000_000
