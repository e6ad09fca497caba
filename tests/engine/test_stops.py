"""Stop strings over pieces of text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.engine.stops import StopFinder

SMALL = st.text(alphabet="abc", min_size=1, max_size=4)


def feed(stops, pieces, include=False, active_from=0):
    """(text shown piece by piece, stop found or None); flushes if none was found."""
    finder, shown = StopFinder(tuple(stops), include), []
    for i, piece in enumerate(pieces):
        text, stop = finder.push(piece, active=i >= active_from)
        shown.append(text)
        if stop is not None:
            return shown, stop
    return [*shown, finder.flush()], None


def test_a_stop_string_that_spans_pieces_is_cut_and_never_shown():
    assert feed(["END"], ["ab E", "N", "D more"]) == (["ab ", "", ""], "END")


def test_a_false_start_comes_out_when_it_is_refuted():
    assert feed(["END"], ["xE", "Nx", "y"]) == (["x", "ENx", "y", ""], None)


def test_what_is_held_is_flushed_at_the_end():
    assert feed(["END"], ["xEN"]) == (["x", "EN"], None)


def test_the_leftmost_of_two_matches_in_one_piece_is_cut():
    assert feed(["b", "END"], ["aENDbEND"]) == (["a"], "END")
    assert feed(["END"], ["aENDxEND"]) == (["a"], "END")


def test_of_two_matches_at_one_place_the_shorter_wins():
    assert feed(["abc", "ab"], ["xabc"]) == (["x"], "ab")


def test_the_stop_string_is_kept_when_asked():
    assert feed(["END"], ["aE", "NDb"], include=True) == (["a", "END"], "END")


def test_a_match_before_the_minimum_is_ordinary_text():
    assert feed(["b"], ["ab", "c", "b"], active_from=1) == (["ab", "c", ""], "b")
    assert feed(["abc", "b"], ["ab", "x"], active_from=1) == (["", "abx", ""], None)


def test_a_match_that_ends_after_the_minimum_counts_even_if_it_began_before():
    assert feed(["abc"], ["ab", "c"], active_from=1) == (["", ""], "abc")


def test_a_stop_string_with_itself_as_prefix_is_found():
    assert feed(["aab"], ["aaa", "b"]) == (["a", ""], "aab")


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(SMALL, min_size=1, max_size=3), st.lists(st.text(alphabet="abc", max_size=5), max_size=8))
def test_shown_text_is_a_prefix_and_holds_no_stop_string_nor_a_part_at_its_end(stops, pieces):
    finder, shown, whole = StopFinder(tuple(stops)), "", ""
    for piece in pieces:
        text, stop = finder.push(piece)
        shown, whole = shown + text, whole + piece
        assert whole.startswith(shown)
        assert not any(s in shown for s in stops)
        if stop is not None:
            assert whole[len(shown) :].startswith(stop)
            return
        held = whole[len(shown) :]
        assert all(not (whole.endswith(s[:n]) and n > len(held)) for s in stops for n in range(1, len(s)))
    assert shown + finder.flush() == whole
    assert not any(s in whole for s in stops)
