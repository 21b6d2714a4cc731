"""Golden runs: eight small training runs whose weights and metrics must be bitwise equal after a refactoring.

    python benchmarks/golden.py             compare with golden.json; exit status 1 on a difference
    python benchmarks/golden.py --write     replace golden.json, after an intended change of results
    python benchmarks/golden.py --resume FOLDER
                                            also resume the runs that --leave FOLDER of another commit stopped

Floating-point results depend on the versions of torch, torchvision and timm and on the instruction set of the CPU. If
they differ from those of golden.json, the comparison is skipped and the exit status is 0.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).with_name("golden.json")
# Keys of a record of metrics.jsonl that measure time or name the start of a run.
TIMES = ("time", "images_per_s", "wait", "eta_s", "seconds", "resumed")
CLASSES = ("ant", "bee", "cat")
BASE = {
    "MODEL.ARCH": "resnet8", "MODEL.NUM_CLASSES": 3, "TRAIN.IM_SIZE": 16, "TEST.IM_SIZE": 18, "TRAIN.BATCH_SIZE": 8,
    "TEST.BATCH_SIZE": 16, "TRAIN.WORKERS": 2, "TRAIN.PRINT_FREQ": 2, "OPTIM.MAX_EPOCH": 3, "OPTIM.WARMUP_EPOCHS": 1,
    "OPTIM.BASE_LR": 0.05, "OPTIM.LR_UPDATE": "step", "CHECKPOINT.EVERY_STEPS": 3, "CHECKPOINT.KEEP_LAST": 100,
    "LOG.TENSORBOARD": False, "RNG_SEED": 7,
}  # fmt: skip


def draw_images(root: Path) -> None:
    """Write 48 + 37 noise PNGs in three classes, and a multi-label CSV for each split."""
    rng = np.random.default_rng(0)
    for split, num in (("train", 48), ("val", 37)):
        rows = ["image,labels"]
        for index in range(num):
            label = index % 3
            path = root / split / CLASSES[label] / f"{index:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            base = np.full(3, 70) + 70 * (np.arange(3) == label)
            pixels = np.clip(base + rng.normal(0, 40, (5, 6, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).resize((36, 30), Image.NEAREST).save(path)
            labels = {CLASSES[label], CLASSES[index // 3 % 3]} if index % 5 else set()
            rows.append(f"{path.relative_to(root)},{';'.join(sorted(labels))}")
        (root / f"{split}.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")


def run_tool(tool: str, args: list[str], env: dict[str, str] | None = None) -> None:
    """Run tools/TOOL; raise RuntimeError with its output if it fails."""
    command = [sys.executable, str(ROOT / "tools" / tool), *args]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")


def golden_runs(root: Path) -> dict[str, dict]:
    """Return the options of each run by name, in the order to run them; `nproc` is the number of processes."""
    folder = {"TRAIN.DATASET": root}
    teacher = root / "out" / "mixed" / "best.pth.tar"
    many = {"DATA.NAME": "multilabel", "TRAIN.SPLIT": "train", "TEST.SPLIT": "val", "LOSS.NAME": "bce"}
    tuned = {"FINETUNE.WEIGHTS": teacher, "FINETUNE.FREEZE": "stem", "FINETUNE.LR_MULT.fc": 10}
    return {
        "mixed": {
            **folder, "AUG.MIXUP": 0.4, "AUG.CUTMIX": 1.0, "EMA.HALF_LIFE": 40, "TRAIN.GLOBAL_BATCH_SIZE": 16,
            "TRAIN.AMP": "bf16", "AUG.POLICY": "rand-m7-mstd0.5-inc1", "AUG.ERASING": 0.5, "OPTIM.CLIP_NORM": 1.0,
            "LOSS.LABEL_SMOOTHING": 0.1,
        },
        "multilabel": {**folder, **many},
        "distilled": {**folder, "DISTILL.TEACHER": "resnet8", "DISTILL.WEIGHTS": teacher, "DISTILL.TEMPERATURE": 2.0},
        "finetuned": {**folder, **tuned},
        "device_loader": {**folder, "DATA.LOADER": "device", "OPTIM.NAME": "adamw", "OPTIM.BASE_LR": 0.002},
        "packed": {"DATA.NAME": "packed", "TRAIN.DATASET": root / "packed", "DATA.WORKER_KIND": "thread"},
        "two_processes": {
            **folder, "nproc": 2, "MODEL.SYNCBN": True, "OPTIM.LR_POLICY": "steps", "OPTIM.STEPS": "[0, 2]",
        },
        "zero1": {**folder, "nproc": 2, "DIST.SHARD": "zero1", "OPTIM.NAME": "adamw", "OPTIM.BASE_LR": 0.002},
    }  # fmt: skip


def train(out_dir: Path, options: dict) -> None:
    """Train one golden run into out_dir."""
    settings = {**BASE, **options, "OUT_DIR": out_dir}
    processes = ["--nproc", str(settings.pop("nproc"))] if "nproc" in settings else []
    run_tool("train_net.py", processes + [str(value) for pair in settings.items() for value in pair])


def hash_tensors(content: object) -> str:
    """Return the SHA-256 of all tensors in nested containers, in order, with their paths, dtypes and shapes."""
    digest = hashlib.sha256()

    def add(value: object, place: str) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                add(item, f"{place}/{key}")
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                add(item, f"{place}/{number}")
        elif isinstance(value, torch.Tensor):
            digest.update(f"{place} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    add(content, "")
    return digest.hexdigest()


def fingerprint(out_dir: Path) -> dict[str, str]:
    """Return the hashes of the tensors of the last checkpoint and of the values in metrics.jsonl."""
    last = sorted((out_dir / "checkpoints").glob("ckpt_ep_???.pth.tar"))[-1]
    content = torch.load(last, map_location="cpu", weights_only=True)
    records = [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    figures = [{key: record[key] for key in sorted(record) if key not in TIMES} for record in records]
    parts = {key: hash_tensors(content[key]) for key in ("state_dict", "ema_state_dict", "optimizer") if key in content}
    return {**parts, "metrics": hashlib.sha256(json.dumps(figures).encode()).hexdigest()}


def find_environment() -> dict[str, str]:
    """Return the CPU's vendor and vector instructions and the versions that determine floating-point results."""
    packages = ("torch", "torchvision", "timm", "numpy", "pillow")
    cpuinfo = Path("/proc/cpuinfo")  # MKL and oneDNN choose their kernels by vendor and by more than AVX512
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    features = {*re.findall(r"\b(?:AuthenticAMD|GenuineIntel|(?:amx|avx|fma)\w*)\b", text)}
    cpu = " ".join([torch.backends.cpu.get_cpu_capability(), *sorted(features)])
    return {"cpu": cpu, **{name: version(name) for name in packages}}


def keep_first_epoch(out_dir: Path) -> None:
    """Remove the checkpoints after the start of epoch 2, as if the run had been killed there."""
    for path in (out_dir / "checkpoints").iterdir():
        if path.name > "ckpt_ep_001_step_000003.pth.tar":
            path.unlink()


def run_all(root: Path, leave: Path | None) -> dict[str, dict[str, str]]:
    """Train all golden runs below `root` and return their fingerprints; with `leave`, remove the later checkpoints."""
    draw_images(root)
    run_tool("pack_dataset.py", [str(root / "packed"), "TRAIN.DATASET", str(root)])
    found = {}
    for name, options in golden_runs(root).items():
        train(root / "out" / name, options)
        found[name] = fingerprint(root / "out" / name)
        print(f"{name:14} {found[name]['state_dict'][:16]} {found[name]['metrics'][:16]}", flush=True)
    if leave:
        for name in found:
            if name != "mixed":  # the other runs use it as teacher
                keep_first_epoch(root / "out" / name)
    return found


def compare(expected: dict[str, dict[str, str]], found: dict[str, dict[str, str]]) -> int:
    """Print the differing fingerprints; return their number."""
    places = [(name, part) for name in expected for part in expected[name]]
    different = [f"{name}: {part}" for name, part in places if found.get(name, {}).get(part) != expected[name][part]]
    for line in different:
        print(f"DIFFERENT {line}")
    print(f"{len(places) - len(different)} of {len(places)} fingerprints are equal")
    return len(different)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--leave", type=Path, metavar="FOLDER", help="folder for runs that are stopped in epoch 2")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="folder with runs from --leave to resume")
    args = parser.parse_args()
    environment = find_environment()
    golden = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
    if not args.write and golden.get("environment") != environment:
        print(f"skipped: golden.json is from {golden.get('environment')}; this environment is {environment}")
        return 0
    if args.resume:
        found = {}
        for name, options in golden_runs(args.resume).items():
            train(args.resume / "out" / name, options)
            found[name] = fingerprint(args.resume / "out" / name)
        return bool(compare(golden["runs"], found))
    with tempfile.TemporaryDirectory() as temporary:
        root = args.leave.absolute() if args.leave else Path(temporary)
        found = run_all(root, args.leave)
    if args.write:
        GOLDEN.write_text(json.dumps({"environment": environment, "runs": found}, indent=2) + "\n", encoding="utf-8")
        return 0
    return bool(compare(golden["runs"], found))


if __name__ == "__main__":
    sys.exit(main())
