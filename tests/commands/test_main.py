"""The console command: its list of commands, help texts, unknown commands and flags, and the ways to start it."""

import importlib
import re

import pytest
from support.processes import free_port
from support.runs import ROOT, run_python, run_tool, small_options

from distribuuuu import __version__
from distribuuuu.commands.main import dispatch, find_commands

COMMANDS = find_commands()


def output_of(capsys, *args: str) -> tuple[int | str | None, str, str]:
    try:
        status = dispatch("distribuuuu", args)
    except SystemExit as left:  # --help
        status = left.code
    return status, *capsys.readouterr()


@pytest.mark.parametrize("args", [(), ("--help",), ("help",)])
def test_the_list_has_a_line_for_each_command_by_group(args, capsys):
    assert output_of(capsys, "--version")[:2] == (0, f"distribuuuu {__version__}\n")
    status, out, _ = output_of(capsys, *args)
    assert status == 0 and out.startswith("usage: distribuuuu COMMAND")
    listed = dict(re.findall(r"^  (\w+) +(\S.+)$", out, re.MULTILINE))
    assert listed == {name: command.summary for name, command in COMMANDS.items()}
    assert all(len(line) <= 80 for line in out.splitlines())
    assert re.findall(r"^([A-Z].+):$", out, re.MULTILINE)[:1] == ["Run"] and list(listed)[:2] == ["train", "test"]


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_function_and_a_help_text_of_80_columns(name, capsys, monkeypatch):
    assert callable(getattr(importlib.import_module(COMMANDS[name].module), name))
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = output_of(capsys, "help", name)
    assert status in (0, None) and out.startswith(f"usage: distribuuuu {name} ")
    prose = [line for line in out.splitlines() if not line.startswith(("usage", "  distribuuuu"))]
    assert "%(prog)s" not in out and max(map(len, prose)) <= 80


def test_the_list_imports_nothing_that_takes_time():
    code = (
        "import sys; sys.argv = ['distribuuuu']; from distribuuuu.commands.main import main; main();"
        "sys.exit(bool({'torch', 'numpy', 'yaml', 'argparse', 'distribuuuu.config'} & set(sys.modules)))"
    )
    assert run_python("-c", code).returncode == 0


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    for args, said in [
        (["trian"], "no such command: trian; did you mean train"),
        (["xyzzy"], "expected one of train, test"), (["--cfg", "x.yaml"], "did you mean distribuuuu train --cfg ...?"),
    ]:  # fmt: skip
        status, out, err = output_of(capsys, *args)
        assert (status, out) == (2, "") and said in err and err.startswith("command line: ")


@pytest.mark.parametrize("name", ["train_net.py", "test_net.py", "pack_dataset.py"])
def test_the_scripts_start_commands(name):
    if not (tool := ROOT / "tools" / name).exists():
        pytest.skip(f"{name} has been deleted")
    name, prog = re.search(r'start_command\("(\w+)", "(\S+)", sys.argv', tool.read_text()).groups()
    assert name in COMMANDS and prog == tool.name and f"`distribuuuu {name}`" in tool.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["--nproc", "run", "launch"])
def test_several_processes_of_the_module_and_of_the_script(launcher, image_folder, tmp_path):
    words = small_options(image_folder, tmp_path / "out", "OPTIM.MAX_EPOCH", 1)
    module = ["-m", "distribuuuu", "train"]
    program = module if launcher == "run" else [ROOT / "tools" / "train_net.py"]
    flags = ["--nproc_per_node=2", f"--master_port={free_port()}"]
    command = ["-W", "ignore", "-m", f"torch.distributed.{launcher}", *flags, *program]
    if launcher == "--nproc":
        command = [*module, "--nproc", "2"]
    done = run_python(*command, *words)
    assert done.returncode == 0, done.stderr
    name = "--nproc" if launcher == "--nproc" else "torchrun"
    assert f"launcher: {name}, process 0 of 2; backend gloo" in done.stderr
    assert "global batch 24 = 12 images x 1 micro-batch x 2 processes" in done.stderr
    tested = run_tool("test_net.py", *words)
    assert tested.returncode == 0 and "of 37 images" in tested.stderr


def test_a_repeated_flag_for_configs_is_refused_since_the_last_one_alone_would_be_read(capsys, tmp_path):
    words = ["--cfg", f"{tmp_path}/a.yaml", f"--cfg={tmp_path}/b.yaml", "OUT_DIR", str(tmp_path / "out")]
    assert dispatch("distribuuuu", ["train", *words]) == 2
    assert "--cfg: got it 2 times; expected it once; fix: name all files after one --cfg" in capsys.readouterr().err
