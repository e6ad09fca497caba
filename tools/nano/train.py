"""Trains nano from the prepared text and writes its checkpoint.

On one GPU:   python tools/nano/prepare.py --out .nano
              python tools/nano/train.py --data .nano --device cuda --minutes 16 --out out
On a CPU, a check that everything runs:   python tools/nano/train.py --steps 50 --device cpu --tiny-batch

`--begin`, `--end`, `--save-state` and `--resume` split the trunk's schedule over several runs. Whatever happens in a
stage, the checkpoint of the weights reached so far is written to OUT/nano.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
import traceback
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "hal"), str(Path(__file__).parent)]

import speed  # noqa: E402
import stages  # noqa: E402
from config import config_json, tensor_table  # noqa: E402
from data import Split, TokenStream, load_split  # noqa: E402
from evaluate import bits_per_byte, full_report  # noqa: E402
from export import export_checkpoint  # noqa: E402
from init import init_weights  # noqa: E402
from optim import Optimiser  # noqa: E402

from deepinfer.model.engram_vocab import engram_token_map  # noqa: E402
from deepinfer.model.reference import Numerics, Reference, ReferenceConfig  # noqa: E402

STAGES = ("trunk", "draft", "confidence", "evaluate")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / ".nano", help="what prepare.py wrote")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "nano")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of the streams; bfloat16 on a GPU")
    parser.add_argument("--stages", default=",".join(STAGES), help="comma-separated part of " + ",".join(STAGES))
    parser.add_argument("--minutes", type=float, default=16.0, help="trunk minutes")
    parser.add_argument("--draft-minutes", type=float, default=3.0)
    parser.add_argument("--confidence-seconds", type=float, default=40.0)
    parser.add_argument("--evaluate-seconds", type=float, default=60.0, help="for each part of the evaluation")
    parser.add_argument("--steps", type=int, help="fixed trunk and draft steps instead of minutes")
    parser.add_argument("--begin", type=float, default=0.0, help="schedule position at the start of this run")
    parser.add_argument("--end", type=float, default=1.0, help="and at its end")
    parser.add_argument("--save-state", type=Path)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--tiny-batch", action="store_true", help="256 tokens a step; short text; for CPUs")
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--step-tokens", type=int, default=32768)
    parser.add_argument("--index-every", type=int, default=1, help="train the indexers every so many steps")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compile-attention", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where a trunk step's time goes, then go on")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def make_settings(args: argparse.Namespace) -> stages.Settings:
    if args.tiny_batch:
        return stages.Settings(256, 256, 256, 256, draft_sequences=1)
    return stages.Settings(args.step_tokens, args.micro_tokens, index_every=args.index_every)


def build_model(args: argparse.Namespace, device: torch.device) -> tuple[dict, stages.Model]:
    """config.json's content and a model with fresh (or resumed) masters."""
    token_map = engram_token_map(args.data / "tokenizer.json", 2048)
    config = config_json(int(token_map.max()) + 1)
    masters = init_weights(config, args.seed)
    if args.resume:
        saved = torch.load(args.resume, map_location="cpu", weights_only=True)["masters"]
        masters = {name: saved[name] for name in masters}
    masters = {name: torch.nn.Parameter(m.to(device), requires_grad=False) for name, m in masters.items()}
    dtype = getattr(torch, args.dtype) if args.dtype else torch.bfloat16 if device.type == "cuda" else torch.float32
    reference_config = ReferenceConfig.from_dict({**config, "image_token_id": None})
    net = Reference(reference_config, masters, Numerics("none", "float32", dtype), token_map.to(device))
    return config, stages.Model(masters, tensor_table(config), net, device)


def run_trunk(args, model: stages.Model, settings, train: Split, log: stages.Log) -> None:
    optimiser = Optimiser(model.require_grad(draft=False), model.table)
    if args.resume:
        state = torch.load(args.resume, map_location=model.device, weights_only=True)
        if "optimiser" in state:
            optimiser.load_state_dict(state["optimiser"])
    # A resumed run draws other text first, so that two runs together do not repeat the first passes.
    stream = TokenStream(train, model.device, args.seed + int(1000 * args.begin))

    def save() -> None:
        if args.save_state:
            masters = {n: m.detach() for n, m in model.masters.items()}
            torch.save({"masters": masters, "optimiser": optimiser.state_dict()}, args.save_state)

    clock = stages.Clock(args.minutes * 60, args.steps, args.begin, args.end)
    try:
        stages.trunk_stage(model, optimiser, stream, clock, settings, log, save)
    finally:
        save()


def run_draft(args, model: stages.Model, settings, train: Split, log: stages.Log) -> None:
    optimiser = Optimiser(model.require_grad(draft=True), model.table)
    stream = TokenStream(train, model.device, args.seed + 77)
    stages.draft_stage(model, optimiser, stream, stages.Clock(args.draft_minutes * 60, args.steps), settings, log)


def profile_trunk(args, model: stages.Model, settings, train: Split) -> None:
    """Prints step times at places of the schedule and the kernels of a sparse step; weights move a little."""
    from torch.profiler import ProfilerActivity, profile

    optimiser = Optimiser(model.require_grad(draft=False), model.table)
    stream = TokenStream(train, model.device, 5)

    def run(steps: int, at: float) -> float:
        quiet = stages.Log(None, 1e9)
        quiet.last = started = time.time()
        stages.trunk_stage(model, optimiser, stream, stages.Clock(0, steps, at, at), settings, quiet)
        torch.cuda.synchronize()
        return time.time() - started

    for at in (0.0, 0.3, 0.9):
        warm, timed = run(2, at), run(4, at)
        print(f"profile at {at}: warm-up {warm:.1f} s, step {timed / 4 * 1000:.0f} ms, "
              f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run(1, 0.3)
    print(recorded.key_averages().table(sort_by="cuda_time_total", row_limit=32, max_name_column_width=64), flush=True)


@contextlib.contextmanager
def survive(log: stages.Log, stage: str):
    """A failing stage is reported and the next ones still run: the checkpoint must be written."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - any failure is printed, and the exit status tells
        traceback.print_exc()
        log.write(stage=stage, failed=f"{type(error).__name__}: {error}")
        survive.failed = True


survive.failed = False


def main(arguments: list[str] | None = None) -> int:
    args = parse_arguments(arguments)
    device, wanted = torch.device(args.device), set(args.stages.split(","))
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.tiny_batch and not (args.data / "tokenizer.json").exists():
        import prepare

        args.data = args.out / "data"
        prepare.prepare_small(args.data)
    log = stages.Log(args.out / "log.jsonl", 10.0 if not args.tiny_batch else 1.0)
    speed.keep_constants()
    config, model = build_model(args, device)
    settings, train = make_settings(args), load_split(args.data, "train")
    log.write(stage="start", parameters=sum(m.numel() for m in model.masters.values()), torch=torch.__version__)
    with speed.Compiled(args.compile, args.compile_attention):
        if args.profile:
            with survive(log, "profile"):
                profile_trunk(args, model, settings, train)
        if "trunk" in wanted:
            with survive(log, "trunk"):
                run_trunk(args, model, settings, train, log)
    if "draft" in wanted:
        with survive(log, "draft"):
            run_draft(args, model, settings, train, log)
    calibration = load_split(args.data, "calibration")
    if "confidence" in wanted:
        with survive(log, "confidence"):
            tokens, documents = (96, 2) if args.tiny_batch else (768, 93)
            stages.confidence_stage(model, calibration, tokens, documents, args.confidence_seconds, log)
    folder = args.out / "nano"
    log.write(stage="export", bytes=export_checkpoint(folder, config, model.masters, args.data))
    if "evaluate" in wanted:
        with survive(log, "evaluate"):
            tiny = {"documents": 1, "draft_documents": 1, "draft_tokens": 64, "most_tokens": 300}
            report = full_report(folder, args.data, device, seconds=args.evaluate_seconds,
                                 dtype=model.net.numerics.dtype, **(tiny if args.tiny_batch else {}))
            (args.out / "report.json").write_text(json.dumps(report, indent=1))
            print(json.dumps(report, indent=1), flush=True)
    elif "trunk" in wanted and not args.tiny_batch:
        stages.deployed(model)
        log.write(stage="calibration", bits_per_byte=bits_per_byte(
            model.net, calibration, device, range(0, 93, 6), most_tokens=4096)[0])
    return int(survive.failed)


if __name__ == "__main__":
    sys.exit(main())
