"""The packaged nano, through the engine with default numerics: a fast part of what tools/nano/measure.py shows."""

import functools
import json

import pytest

from tests.model.nano_models import ROOT, nano_folder, nano_tools

STORED = ROOT / "reports" / "nano-quality.json"
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


def test_drafts_are_accepted_and_confidence_foretells_it():
    """Bounds for a few hundred drafts, which scatter by a tenth; the bars themselves are asked of the stored report."""
    assert report()["drafts"] >= DRAFTS * 0.8
    assert report()["mean_accepted"] >= 1.2
    assert report()["confidence_auc"] >= 0.62
    assert report()["confidence_ece_15_bins"] <= 0.12


def test_the_stored_report_is_of_these_weights_and_over_every_bar():
    if not STORED.is_file():
        pytest.skip(f"no {STORED.name}: tools/nano/measure.py --json writes it")
    stored = json.loads(STORED.read_text("utf-8"))
    with nano_tools():
        import measure
    assert stored["weights_sha256"] == measure.weights_sha256(nano_folder("trained"))
    assert 1_000_000 <= stored["bytes"] <= 1_250_000
    assert stored["ratio"] == pytest.approx(stored["bits_per_byte"] / stored["xz_9e_bits_per_byte"])
    assert stored["ratio"] <= 0.9
    assert stored["drafts"] >= 5_000
    assert stored["mean_accepted"] >= 1.5
    assert stored["confidence_ece_15_bins"] <= 0.05
    assert stored["confidence_auc"] >= 0.70


def test_the_checkpoint_is_small_enough_to_ship():
    assert sum(path.stat().st_size for path in nano_folder("trained").iterdir()) <= 16_000_000
