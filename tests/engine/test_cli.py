"""The command line: what it prints, how it fails, and that every failure is one line that says what to do."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer.cli.generate import read_prompts
from deepinfer.cli.main import main
from deepinfer.model_path import packaged_models

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "tests" / "oracle" / "tiny")
ENGINE = ["--model", TINY, "--dtype", "float32", "--act-quant", "none", "--max-num-seqs", "4", "--max-model-len", "256"]
GREEDY = ["--temperature", "0", "--max-tokens", "6"]


@pytest.fixture
def run(capsys, monkeypatch):
    """run(*arguments, stdin=None) -> (status, stdout, stderr), in this process."""

    def call(*arguments: str, stdin: str | None = None):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin or ""))
        status = main(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def process(*arguments: str, stdin: str = "", cwd: Path | None = None) -> subprocess.CompletedProcess:
    """`python -m deepinfer ...` as its own process."""
    path = os.pathsep.join(str(ROOT / part) for part in (".", "hal", "backends/cpu"))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100"}
    command = [sys.executable, "-m", "deepinfer", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, env=environment, cwd=cwd, check=False)


def assert_one_line_error(text: str, *words: str) -> None:
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text
    for word in words:
        assert word in text


# ------------------------------------------------------------------------------------------------- generate


def test_generate_prints_json_with_one_entry_per_prompt_in_order(run):
    status, out, _ = run("generate", "hello", "good bye", "--json", *ENGINE, *GREEDY)
    outputs = json.loads(out)
    assert status == 0
    assert [output["prompt"] for output in outputs] == ["hello", "good bye"]
    for output in outputs:
        assert set(output) == {"prompt", "outputs", "error"} and output["error"] is None
        (choice,) = output["outputs"]
        assert set(choice) == {"text", "token_ids", "finish_reason"}
        assert 1 <= len(choice["token_ids"]) <= 6 and choice["finish_reason"] in ("stop", "length")


def test_the_same_greedy_text_comes_from_argument_stdin_and_file(run, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("hello\n\n", encoding="utf-8")
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "hello"}\n', encoding="utf-8")
    texts = {
        run("generate", "hello", *ENGINE, *GREEDY)[1],
        run("generate", *ENGINE, *GREEDY, stdin="hello\n")[1],
        run("generate", "-", *ENGINE, *GREEDY, stdin="hello\n")[1],
        run("generate", "--prompt-file", str(file), *ENGINE, *GREEDY)[1],
        run("generate", "--prompt-file", str(lines), *ENGINE, *GREEDY)[1],
    }
    assert len(texts) == 1 and texts.pop().endswith("\n")


def test_a_bad_prompt_fails_alone_and_the_status_says_so(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"hello"\n{"prompt_token_ids": [99999999]}\n', encoding="utf-8")
    status, out, _ = run("generate", "--prompt-file", str(file), "--json", *ENGINE, *GREEDY)
    good, bad = json.loads(out)
    assert status == 1
    assert good["error"] is None and good["outputs"][0]["token_ids"]
    assert bad["outputs"] == [] and "99999999" in bad["error"]


def test_a_line_that_is_no_json_is_told_by_its_number(run, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('"hello"\n\n{"prompt":\n', encoding="utf-8")
    status, out, err = run("generate", "--prompt-file", str(file), *ENGINE, *GREEDY)
    assert status == 2 and out == ""
    assert_one_line_error(err, "line 3", "no JSON", "column")


@pytest.mark.parametrize("inside", ["\u2028", "\x85", "\x0c"], ids=ascii)
def test_only_newlines_end_a_prompt_of_a_file(inside, tmp_path):
    (tmp_path / "p.txt").write_text(f"a{inside}b\r\nc\n", encoding="utf-8")
    assert read_prompts([], tmp_path / "p.txt") == [f"a{inside}b", "c"]
    if inside != "\x0c":  # which JSON escapes
        (tmp_path / "p.jsonl").write_text(f'"a{inside}b"\n"c"\n', encoding="utf-8")
        assert read_prompts([], tmp_path / "p.jsonl") == [f"a{inside}b", "c"]


def test_logprobs_and_choices_appear_when_asked_for(run):
    status, out, _ = run("generate", "hello", "--json", "--logprobs", "2", "--n", "2", "--max-tokens", "3", *ENGINE)
    (output,) = json.loads(out)
    assert status == 0 and len(output["outputs"]) == 2
    for choice in output["outputs"]:
        assert len(choice["logprobs"]) == len(choice["token_ids"])
        assert all(2 <= len(entry) <= 3 for entry in choice["logprobs"])


def test_echo_puts_the_prompt_before_the_text(run):
    plain = run("generate", "hello", *ENGINE, *GREEDY)[1]
    assert run("generate", "hello", "--echo", *ENGINE, *GREEDY)[1] == "hello" + plain


def test_several_prompts_are_told_apart(run):
    out = run("generate", "hello", "good bye", *ENGINE, *GREEDY)[1]
    assert "--- prompt 1, choice 1" in out and "--- prompt 2, choice 1" in out


@pytest.mark.skipif("nano" not in packaged_models(), reason="no trained nano in this tree")
def test_without_a_model_the_packaged_one_writes_python(run):
    status, out, _ = run("generate", "import os\nimport", "--temperature", "0", "--max-tokens", "4")
    assert status == 0
    assert out.split()[0].isidentifier()


# ------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["bogus"], 2, ["bogus", "deepinfer --help"]),
        (["generate", "x", "--bogus"], 2, ["--bogus", "deepinfer generate --help"]),
        (["generate", "x", "--max-tokens", "many"], 2, ["--max-tokens", "4k"]),
        (["generate", "x", "--dtype", "int8"], 2, ["--dtype", "bfloat16"]),
        (["generate"], 2, ["no prompt"]),
        (["generate", "--prompt-file", "/nowhere/p.txt"], 2, ["/nowhere/p.txt"]),
        (["generate", "x", "--logit-bias", "a=b"], 2, ["logit-bias", "17=-100"]),
        (["generate", "x", "--model", "/nowhere"], 1, ["model", "/nowhere", "folder"]),
        (["generate", "x", "--model", TINY, "--backend", "toaster"], 1, ["toaster", "cpu"]),
        (["generate", "x", "--model", TINY, "--backend", "cpu:9"], 1, ["cpu", "9"]),
        (["generate", "x", "--model", TINY, "--temperature", "-1"], 1, ["temperature"]),
        (["generate", "x", "--model", TINY, "--max-model-len", "16G"], 1, ["max_model_len"]),
        (["bench"], 2, ["Missing command"]),
        (["bench", "throughput", "--num-prompts", "0"], 2, ["--num-prompts", "at least 1"]),
        (["bench", "latency", "--input-len", "0"], 2, ["--input-len", "at least 1"]),
        (["bench", "host", "--steps", "0"], 2, ["--steps", "at least 1"]),
        (["hal", "bench", "--backend", "cpu", "--shapes", "nano", "--op", "rope", "--rows", "7"], 2, ["7", "1, 16, 64, 256"]),
        (["chat", "--n", "2"], 2, ["--n 2", "generate"]),
        (["check", "--model", "/nowhere"], 1, ["/nowhere"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_each_mistake_is_one_line_that_says_what_to_do(run, arguments, status, words):
    found, out, err = run(*arguments)
    assert found == status and out == ""
    assert_one_line_error(err, *words)


def test_an_unexpected_error_is_named_and_points_to_the_debug_flag(run, monkeypatch):
    def broken():
        raise KeyError("nothing here")

    monkeypatch.setattr("deepinfer.cli.hal.describe_backends", broken)
    status, _, err = run("hal", "list")
    assert status == 1
    assert_one_line_error(err, "KeyError", "--debug")


def test_an_interrupt_says_so_and_exits_with_130(run, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("deepinfer.cli.hal.describe_backends", interrupted)
    assert run("hal", "list") == (130, "", "\ninterrupted\n")


@pytest.mark.parametrize("place", [0, 1, 4])
def test_debug_lets_the_traceback_through_wherever_it_stands(run, place):
    from deepinfer.errors import ConfigError

    arguments = ["generate", "x", "--model", "/nowhere"]
    arguments.insert(place, "--debug")
    with pytest.raises(ConfigError):
        run(*arguments)


# ------------------------------------------------------------------------------------------------- the others


def test_help_says_what_the_current_device_supports(run):
    for arguments in ([], ["--help"], ["generate", "--help"]):
        status, out, _ = run(*arguments)
        assert status == 0
        assert "cpu:0" in out and "float32" in out


def test_version_is_the_package_s(run):
    import deepinfer

    assert run("--version")[1] == f"deepinfer {deepinfer.__version__}\n"


def test_check_finds_nothing_wrong_with_a_sound_checkpoint(run):
    status, out, _ = run("check", "--model", TINY, "--max-model-len", "1k", "--json")
    report = json.loads(out)
    assert status == 0 and report["problems"] == [] and report["plan"]["max_model_len"] == 1024


def test_hal_list_accounts_for_every_op(run):
    from deepinfer_hal.card import all_cards

    described = json.loads(run("hal", "list", "--json")[1])
    cpu = next(backend for backend in described["backends"] if backend["name"] == "cpu")
    (device,) = cpu["devices"]
    assert described["ops"] == len(all_cards())
    assert sorted(device["kernel_ops"] + device["reference_only_ops"]) == sorted(all_cards())
    assert "native kernels" in cpu["build"]
    assert "native kernels" in run("hal", "list")[1]


def test_collect_env_survives_a_broken_package(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepinfer.cli.hal", None)
    status, out, _ = run("collect-env", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["packages"]["numpy"] != "not installed" and facts["hal"].startswith("not available")


def test_collect_env_works_without_the_packages_of_the_command_line():
    program = (
        "import sys\nfor name in ('typer', 'rich', 'torch', 'msgspec'): sys.modules[name] = None\n"
        f"sys.path[:0] = [{str(ROOT)!r}]\n"
        "from deepinfer.cli.main import main\nsys.exit(main(['collect-env']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "packages.numpy" in done.stdout


def test_chat_continues_the_text_turn_by_turn_and_forgets_on_reset(run):
    lines = "hello\n\n/help\nmore\n/reset\nhello\n/exit\nnever read\n"
    status, out, err = run("chat", "--json", *ENGINE, *GREEDY, stdin=lines)
    first, second, again = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and "/exit" in err
    assert first["prompt"] == "hello\n"
    assert second["prompt"] == "hello\n" + first["outputs"][0]["text"].removesuffix("\n") + "\nmore\n"
    assert again == first


def test_chat_forgets_its_oldest_turns_when_the_window_is_full(run):
    lines = "".join(f"{'word ' * 20}{i}\n" for i in range(8)) + "/exit\n"
    status, out, err = run("chat", "--json", *ENGINE, *GREEDY, stdin=lines)
    turns = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and len(turns) == 8
    assert all(turn["error"] is None for turn in turns)
    assert len(turns[-1]["prompt"]) < sum(len(line) for line in lines.splitlines())


def test_bench_throughput_stores_a_report_with_floors(run, tmp_path):
    path = tmp_path / "reports" / "throughput.json"
    sizes = ["--num-prompts", "2", "--input-len", "8", "--output-len", "4", "--repeats", "2", "--warmup", "0"]
    status, out, _ = run("bench", "throughput", *sizes, "--report", str(path), *ENGINE)
    report = json.loads(path.read_text(encoding="utf-8"))
    results = report["results"]
    assert status == 0 and "floor" in out
    assert report["benchmark"] == "throughput" and report["versions"]["torch"] and report["host"]["cpu_count"]
    assert results["decode_step"]["steps"] == 3 and results["decode_step"]["rows"] == 2
    assert 0 < results["decode_step"]["floor_ms"]
    assert results["output_tokens_per_second"]["min"] <= results["output_tokens_per_second"]["median"]
    assert results["kernels"] and results["ceilings"]["bandwidth"] > 0
    assert {op["op"] for op in results["ops"]} >= {"linear", "sparse_attention", "moe_layer", "sample"}


def test_bench_host_reports_step_and_call_times(run):
    status, out, _ = run("bench", "host", "--model", TINY, "--num-seqs", "4", "--steps", "5", "--json")
    results = json.loads(out)["results"]
    assert status == 0 and results["num_seqs"] == 4
    assert 0 < results["plan_and_settle_ms"]["min"] <= results["plan_and_settle_ms"]["p99"]
    assert "call" in results["bound_call_us"]


# ------------------------------------------------------------------------------------------------- processes


def test_a_process_generates_from_a_pipe():
    done = process("generate", "--json", *ENGINE, *GREEDY, stdin="hello\n")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["prompt"] == "hello"
    assert done.stderr == ""


def test_a_process_reports_a_mistake_in_one_line(tmp_path):
    done = process("generate", "x", "--model", "absent", cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert_one_line_error(done.stderr, "absent")
