"""The files for Kubernetes and SkyPilot: the schemas of Kubernetes, and two nodes started by their commands."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.processes import free_port

from distribuuuu.config.run_files import TRAIN_LOG

TOOLS = Path(__file__).parents[2] / "tools"
OPTIONS = ["--cfg", "shapes/resnet14", "MODEL.DUMMY_INPUT", "True", "OPTIM.MAX_EPOCH", "1", "OPTIM.WARMUP_EPOCHS", "0",
           "MODEL.ARCH", "resnet8", "TRAIN.IM_SIZE", "16", "TEST.IM_SIZE", "16", "TRAIN.WORKERS", "0"]  # fmt: skip


def read_kubernetes() -> list[dict]:
    return list(yaml.safe_load_all((TOOLS / "kubernetes" / "train.yaml").read_text()))


def kubernetes_command(rank: int, port: int, out: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of the pod with this index, and its environment."""
    container = read_kubernetes()[1]["spec"]["template"]["spec"]["containers"][0]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert env["MASTER_ADDR"] == "distribuuuu-0.distribuuuu"  # JOB-INDEX.SUBDOMAIN
    env |= {"JOB_COMPLETION_INDEX": str(rank), "GPUS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [*container["command"], *OPTIONS, "OUT_DIR", str(out)], env


def skypilot_command(rank: int, port: int, out: Path) -> tuple[list[str], dict[str, str]]:
    """Return the command of a node, and the environment that SkyPilot sets."""
    run = yaml.safe_load((TOOLS / "skypilot" / "train.yaml").read_text())["run"]
    start = run.partition(" --cfg ")[0].replace("--master-port=29500", f"--master-port={port}")
    env = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_GPUS_PER_NODE": "1",
           "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}  # fmt: skip
    return ["bash", "-c", f'{start} "$@"', "run", *OPTIONS, "OUT_DIR", str(out)], env


def test_the_kubernetes_file_follows_the_schemas():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for resource in read_kubernetes():
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_the_pods_are_selected_and_named_by_the_service():
    service, job = read_kubernetes()
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert job["spec"]["completions"] == job["spec"]["parallelism"]


@pytest.mark.slow
@pytest.mark.parametrize("build", [kubernetes_command, skypilot_command])
def test_two_nodes_train_together(build, tmp_path):
    started, port = [], free_port()
    for rank in (0, 1):
        command, env = build(rank, port, tmp_path / "out")
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **env}
        started.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], errors
    assert "process 0 of 2" in (tmp_path / "out" / TRAIN_LOG).read_text()
