"""`deepinfer hal new`: packages that pass their own tests, within the porter's lines, and the page that quotes them."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepinfer_hal.card import all_cards
from deepinfer_hal.host_memory import argument_spans, merge_spans

from deepinfer.cli.main import main
from deepinfer.errors import ConfigError
from deepinfer.porting import backend_lines, new_backend
from tests.unit.porting_doc import quoted_code, quotes

PORTER_LINES = 60
KINDS = {"torch device": True, "C runtime": False}


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_package_passes_its_own_tests_within_the_porters_lines(kind, tmp_path):
    if not KINDS[kind] and not shutil.which("cc"):
        pytest.skip("the C runtime template needs a C compiler")
    new_backend("mychip", tmp_path / "port", with_torch_device=KINDS[kind])
    assert 20 <= backend_lines(tmp_path / "port") <= PORTER_LINES
    done = run_own_tests(tmp_path / "port")
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


def run_own_tests(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder / "tests")]
    env = {"PYTHONPATH": ":".join([str(folder), *sys.path]), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=120)


def test_placeholders_are_filled_everywhere(tmp_path):
    files = [*new_backend("a_chip", tmp_path / "a"), *new_backend("b_chip", tmp_path / "b", with_torch_device=False)]
    assert all("@" not in str(path.relative_to(tmp_path)) for path in files)
    assert all("@NAME@" not in path.read_text() and "@PACKAGE@" not in path.read_text() for path in files)


@pytest.mark.parametrize("name", ["", "My", "my-chip", "1chip", "class", "größe"])
def test_a_name_that_cannot_be_a_package_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="lower-case Python identifier"):
        new_backend(name, tmp_path / "port")


@pytest.mark.parametrize("name", ["cpu", "cuda", "ascend", "hal", "auto"])
def test_a_name_that_is_taken_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="choose another"):
        new_backend(name, tmp_path / "port")
    assert not (tmp_path / "port").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path, capsys):
    (tmp_path / "kept.txt").write_text("mine")
    assert main(["hal", "new", "mychip", str(tmp_path)]) == 1
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]


def test_the_command_prints_what_it_wrote_and_what_comes_next(tmp_path, capsys):
    assert main(["hal", "new", "mychip", str(tmp_path / "port"), "--torch-device", "npu", "--torch-module", "torch_npu"]) == 0
    printed = capsys.readouterr().out
    assert "deepinfer_mychip/backend.py" in printed and "hal ladder --backend mychip" in printed
    assert 'TORCH_MODULE = "torch_npu"' in (tmp_path / "port" / "deepinfer_mychip" / "backend.py").read_text()


def test_options_that_exclude_each_other_are_a_usage_error(tmp_path, capsys):
    assert main(["hal", "new", "mychip", str(tmp_path / "port"), "--no-torch-device", "--torch-device", "npu"]) == 2
    assert not (tmp_path / "port").exists()


@pytest.mark.parametrize("quote", quotes(), ids=lambda quote: quote.source.split("/")[-1])
def test_the_page_quotes_the_code_as_it_is(quote, tmp_path):
    assert quote.code == quoted_code(quote, tmp_path), "run python -m tests.unit.porting_doc"


def test_the_page_quotes_each_part_that_it_explains():
    assert len(quotes()) >= 6


# ------------------------------------------------------------------------------------- the ladder and host memory


def test_the_ladder_tells_a_reached_rung_by_its_exit_status(capsys):
    assert main(["hal", "ladder", "--backend", "cpu", "--rung", "1"]) == 0
    assert "reached, " in capsys.readouterr().out
    assert main(["hal", "ladder", "--backend", "cpu", "--rung", "5"]) == 1
    assert "capabilities() says graphs=False" in capsys.readouterr().out
    assert main(["hal", "ladder", "--backend", "cpu", "--rung", "9"]) == 1
    assert "there is no rung 9" in capsys.readouterr().err


def test_arguments_that_share_host_memory_share_it_on_the_chip():
    base, other = torch.zeros(8, 4), torch.zeros(3, 4)
    card = all_cards()["unpermute"]
    args = dict(rows=base[2:6, :2], inverse=torch.zeros(3, 1, dtype=torch.int32), shared=base[4:7, 1:3], count=None, out=other)
    spans = merge_spans(argument_spans(card, args))
    start = base.data_ptr()
    shared = next(span for span in spans if span.start <= start + 4 * 8 < span.stop)
    assert (shared.start - start, shared.stop - start, shared.written) == (4 * 8, 4 * (6 * 4 + 3), False)
    assert sorted(span.written for span in spans) == [False, False, True]
