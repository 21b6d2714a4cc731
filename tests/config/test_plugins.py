"""Plug-ins: entries outside of the package, imported once, only if the user names them."""

import os
import pickle
import re
import sys
from pathlib import Path

import pytest
import torch
from support.runs import run_python, small_options

from distribuuuu import evaluate
from distribuuuu.commands.arguments import parse_args
from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.config.locate import RECIPE_PLUGINS, FoundConfig, shipped_file
from distribuuuu.config.plugins import ImportedPlugins, import_plugins
from distribuuuu.config.reader import read_cfg
from distribuuuu.config.registry import DATASETS, LOSSES, MODELS, OPTIMIZERS, SCHEDULES, TASKS
from distribuuuu.inference.load_run import load_run
from distribuuuu.trainer import train_model

TASK = """\
from dataclasses import dataclass

from distribuuuu.config.registry import TASKS
from distribuuuu.config.settings import setting
from distribuuuu.tasks.classification import Classification


@TASKS.register("own_task")
class OwnTask(Classification):
    @dataclass
    class Settings:
        rho: float = setting(0.05, "radius of the perturbation", least=0, most=1)
"""
LOSS = """\
from dataclasses import dataclass

from distribuuuu.config.registry import LOSSES
from distribuuuu.tasks.losses import CrossEntropy


@LOSSES.register("own_loss")
class OwnLoss(CrossEntropy):
    @dataclass
    class Settings:
        scale: float = 1.0
"""
# It leaves a file beside it when it is imported.
HOSTILE = "from pathlib import Path\nPath(__file__).with_suffix('.imported').touch()\n"
REGISTRIES = (TASKS, LOSSES, MODELS, DATASETS, OPTIMIZERS, SCHEDULES)
is_own = re.compile("distribuuuu_plugin_|.*_of_this_test").match


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch, tmp_path):
    """Start with an empty record of plug-ins, in `tmp_path`; after the test, those of other test modules come back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tables, modules = [(registry, dict(registry._table)) for registry in REGISTRIES], dict(sys.modules)
    yield
    forget()
    for registry, table in tables:
        registry._table.update(table)
    sys.modules.update({name: module for name, module in modules.items() if is_own(name)})


def forget() -> None:
    """Remove the plug-ins from this process, as if it were a new one."""
    for registry in REGISTRIES:
        for name in [name for name, entry in registry._table.items() if is_own(entry.__module__)]:
            del registry._table[name]
    for name in filter(is_own, [*sys.modules]):
        del sys.modules[name]


def write(path: str, text: str) -> Path:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)
    return Path(path).absolute()


def problems_of(*words: str, cfg_file: str | None = None) -> list[str]:
    return [str(problem) for problem in read_cfg(cfg_file, words)[1]]


def test_a_path_is_relative_to_the_file_that_names_it_and_is_stored_absolute(tmp_path):
    own = write("lab/own.py", TASK)
    write("lab/own.yaml", "PLUGINS: [./own.py]\nTASK:\n  NAME: own_task\n  KWARGS: {rho: 0.5}\n")
    cfg = load_cfg("lab/own.yaml")
    assert cfg.PLUGINS == (str(own),) and cfg.TASK.NAME == "own_task"
    assert load_cfg(None, ["PLUGINS", "lab/own.py", "TASK.NAME", "own_task"]).PLUGINS == (str(own),)
    (tmp_path / "dumped.yaml").write_text(cfg.dump())
    assert load_cfg("dumped.yaml").PLUGINS == (str(own),)
    assert TASKS.names().count("own_task") == 1


def test_a_module_is_named_as_python_imports_it(tmp_path, monkeypatch):
    write("lib/my_lab_of_this_test/__init__.py", "")
    write("lib/my_lab_of_this_test/tasks.py", TASK)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    cfg = load_cfg(None, ["PLUGINS", "my_lab_of_this_test.tasks", "TASK.NAME", "own_task"])
    assert cfg.PLUGINS == ("my_lab_of_this_test.tasks",)


@pytest.mark.parametrize(("text", "words", "message"), [
    (TASK, "TASK.NAME own_tsk", "TASK.NAME (command line): got 'own_tsk'; .*; did you mean own_task?"),
    (TASK, "TASK.NAME own_task TASK.KWARGS.roh 1", "TASK.KWARGS.roh (command line): no such.* mean rho?"),
    (TASK, "TASK.NAME own_task TASK.KWARGS.rho 2", "TASK.KWARGS.rho (command line): got 2.0; expected 0 to 1"),
    ("x = 1\ny = undefined", "", "PLUGINS (command line): .*own.py fails: NameError: .* (.*own.py:2)"),
    ("def broken(:", "", "PLUGINS (command line): .*own.py fails: SyntaxError: .* (own.py, line 1)"),
    ("import no_such_package", "", "PLUGINS .*own.py fails: ModuleNotFoundError: .*no_such_package.* (.*own.py:1)"),
    (TASK + TASK.replace("OwnTask", "B"), "", "PLUGINS .*: task 'own_task' is registered twice: .*own.py:20)"),
    (None, "", "PLUGINS (command line): no such file: .*own.py; did you mean owner.py?"),
])  # fmt: skip
def test_a_mistake_is_one_message_with_its_place(text, words, message):
    write("owner.py", "")
    if text is not None:
        write("own.py", text)
    (problem,) = problems_of("PLUGINS", "own.py", *words.split())
    for part in message.replace("(", r"\(").replace(")", r"\)").replace("?", r"\?").split(".*"):
        assert part.replace("\\", "") in problem, problem


def test_an_edited_plugin_is_named_on_a_resume(image_folder, tmp_path):
    own, out_dir = write("own.py", LOSS), tmp_path / "out"
    words = small_options(image_folder, out_dir, "PLUGINS", own, "LOSS.NAME", "own_loss")
    train_model(load_cfg(None, words), stop_epoch=1)
    own.write_text(LOSS + "# edited\n")
    train_model(load_cfg(None, words))
    assert (out_dir / "train.log").read_text().count("PLUGINS: edited since the checkpoint: own.py") == 1
    train_model(load_cfg(None, words))
    assert (out_dir / "train.log").read_text().count("PLUGINS: edited") == 1


@pytest.mark.slow
def test_a_script_that_names_itself_is_not_imported_again():
    start = "    print(load_cfg(None, ['PLUGINS', 'own.py', 'TASK.NAME', 'own_task']).TASK.NAME)\n"
    own = write("own.py", f"{TASK}\nif __name__ == '__main__':\n    from distribuuuu.config import load_cfg\n{start}")
    done = run_python(own, cwd=Path.cwd())
    assert done.stdout == "own_task\n", done
    write("run/config.yaml", f"PLUGINS: [{own}]\nTASK: {{NAME: own_task}}\n")
    assert not problems_of(cfg_file=FoundConfig("run/config.yaml"))


def test_help_lists_the_settings_of_the_selected_entry(capsys):
    write("own.py", TASK)
    parse_args(None, ["PLUGINS", "own.py", "TASK.NAME", "own_task", "--help-config", "TASK"], train=True)
    assert "TASK.KWARGS.rho: 0.05\n    radius of the perturbation (0 to 1)\n" in capsys.readouterr().out


@pytest.mark.slow
def test_objects_of_a_plug_in_can_be_read_in_a_process_that_is_not_forked():
    write("own.py", TASK)
    cfg = load_cfg(None, ["PLUGINS", "own.py", "TASK.NAME", "own_task"])
    Path("content").write_bytes(pickle.dumps((ImportedPlugins(), TASKS.get(cfg.TASK.NAME).Settings(rho=0.25))))
    code = "import pickle; print(pickle.load(open('content', 'rb'))[1].rho)"
    done = run_python("-c", code, cwd=Path.cwd())
    assert done.stdout == "0.25\n", done


def test_the_commands_on_a_run_know_its_plug_ins(image_folder, tmp_path):
    own = write("own.py", TASK)
    words = ("PLUGINS", "own.py", "TASK.NAME", "own_task", "TASK.KWARGS.rho", "0.5")
    out_dir = tmp_path / "out"
    cfg = load_cfg(None, small_options(image_folder, out_dir, *words))
    train_model(cfg)
    forget()
    cfg, _ = parse_args(None, [str(out_dir)], train=False)
    assert cfg.PLUGINS == (str(own),) and "own_task" in TASKS
    forget()
    assert load_run(out_dir).cfg.TASK.KWARGS.rho == 0.5
    forget()
    with pytest.raises(ConfigError, match="(?s)TASK.NAME.*PLUGINS.*is code that no file of weights may import; fix"):
        load_run(out_dir / "best.pth.tar")
    assert load_run(out_dir / "best.pth.tar", overrides=["PLUGINS", "own.py"]).cfg.TASK.NAME == "own_task"


@pytest.mark.parametrize("name", ["evil.py", "evil_module_of_this_test"])
@pytest.mark.parametrize("read", ["test", "load_run", "evaluate"])
def test_the_folder_of_a_stranger_imports_nothing_until_the_user_names_it(read, name, copied_run, monkeypatch):
    evil = write(f"{copied_run}/{name.removesuffix('.py')}.py", HOSTILE)
    monkeypatch.syspath_prepend(copied_run)
    config = copied_run / "config.yaml"
    config.write_text(config.read_text().replace("PLUGINS: []\n", f"PLUGINS: [{name}]\n"))
    readers = {
        "test": lambda: parse_args(None, [str(copied_run)], train=False),
        "load_run": lambda: load_run(copied_run),
        "evaluate": lambda: evaluate(copied_run),
    }
    with pytest.raises(ConfigError) as error:
        readers[read]()
    (problem,) = map(str, error.value.problems)
    assert f"{name}, which is code" in problem and f"distribuuuu test {copied_run} PLUGINS " in problem
    assert not evil.with_suffix(".imported").exists()
    parse_args(None, [str(copied_run), "PLUGINS", str(evil) if name.endswith(".py") else name], train=False)
    assert evil.with_suffix(".imported").exists()


def test_the_file_of_a_stranger_imports_nothing(copied_run, small_cfg):
    evil = write("evil.py", HOSTILE)
    load_cfg(None, ["PLUGINS", "evil.py"])  # not even a plug-in that the user has named
    evil.with_suffix(".imported").unlink()
    forget()
    path = copied_run / "best.pth.tar"
    content = torch.load(path, weights_only=True)
    torch.save({**content, "config": {**content["config"], "PLUGINS": (str(evil),)}}, path)
    assert load_run(path).cfg.PLUGINS == ()
    for key in ("MODEL.WEIGHTS", "FINETUNE.WEIGHTS"):
        parse_args(None, _words(small_cfg(key, str(path), "OUT_DIR", "new")), train=True)
    assert not evil.with_suffix(".imported").exists()


def _words(cfg) -> list[str]:
    Path("given.yaml").write_text(cfg.dump())
    return ["--cfg", "given.yaml"]


def test_a_checkpoint_predicts_without_the_plug_ins_that_only_its_training_needed(image_folder, tmp_path):
    write("own.py", LOSS)
    words = ("PLUGINS", "own.py", "LOSS.NAME", "own_loss", "LOSS.KWARGS.scale", "2", "OPTIM.MAX_EPOCH", "1")
    train_model(load_cfg(None, small_options(image_folder, tmp_path / "out", *words)))
    forget()
    cfg = load_run(tmp_path / "out" / "best.pth.tar").cfg
    assert (cfg.LOSS.NAME, cfg.LOSS.KWARGS, cfg.PLUGINS) == ("cross_entropy", {}, ()) and "own_loss" not in LOSSES


def test_the_plug_ins_of_shipped_recipes_register_the_names_that_find_them():
    folder = shipped_file("configs")
    drawing = "shapes/drawing.py"  # of the data set `shapes`
    assert {*RECIPE_PLUGINS, drawing} == {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
    keys = {"airbench": "TASK.NAME", "lookahead": "TASK.NAME", "imagenet": "DATA.NAME"}
    for file, names in RECIPE_PLUGINS.items():
        for name in names:
            cfg = load_cfg(None, [keys.get(name, "MODEL.ARCH"), name])
            assert cfg.PLUGINS == (str(folder / file),) and any(name in table for table in (MODELS, TASKS, DATASETS))


@pytest.mark.slow
def test_a_run_of_a_shipped_recipe_is_found_again_without_a_word(image_folder, tmp_path):
    words = ("MODEL.ARCH", "airbench94", "MODEL.KWARGS.width", 24, "TASK.NAME", "airbench", "OPTIM.MAX_EPOCH", 1)
    out_dir = tmp_path / "out"
    cfg = load_cfg(None, small_options(image_folder, out_dir, *words))
    train_model(cfg)
    config, (own,) = out_dir / "config.yaml", cfg.PLUGINS
    text, checkpoint = config.read_text(), torch.load(out_dir / "best.pth.tar", weights_only=True)
    # Of this installation, of a version whose package contained the code, and of another machine.
    for plugins in ([own], [], ["/other/machine/configs/cifar10/airbench94.py"]):
        forget()
        config.write_text(text.replace(f"- {own}\n", "").replace("PLUGINS:\n", f"PLUGINS: {plugins}\n"))
        assert f"PLUGINS: {plugins}" in config.read_text()
        assert parse_args(None, [str(out_dir)], train=False)[0].PLUGINS == (own,)
        forget()
        alone = tmp_path / "alone.pth.tar"
        torch.save({**checkpoint, "config": {**checkpoint["config"], "PLUGINS": tuple(plugins)}}, alone)
        assert load_run(alone).cfg.PLUGINS == (own,)
    export_run = pytest.importorskip("distribuuuu.commands.export.exporter").export_run
    assert export_run(load_run(out_dir), "safetensors", tmp_path / "exported")["verified"]
    assert "PLUGINS" not in (tmp_path / "exported" / "README.md").read_text()
    forget()
    assert load_run(tmp_path / "exported").cfg.TASK.NAME == "airbench"


def test_a_record_counts_for_its_owner_and_its_path_only(tmp_path):
    own = write("own.py", "")
    import_plugins([str(own)])
    (record,) = (tmp_path / "cache" / "distribuuuu" / "plugins").iterdir()
    other = write("run/own.py", HOSTILE)
    forget()
    import_plugins([str(own)], found_in="run/config.yaml")
    with pytest.raises(ConfigError, match="which is code"):
        import_plugins([str(other)], found_in="run/config.yaml")
    forget()
    record.unlink()
    record.symlink_to(write("copy", f"{own}\n"))
    os.lchown(record, 12345, -1) if os.getuid() == 0 else record.unlink()
    with pytest.raises(ConfigError, match="which is code"):
        import_plugins([str(own)], found_in="run/config.yaml")


def test_a_run_without_plug_ins_imports_no_torch_and_a_record_needs_no_cache(monkeypatch):
    code = "import sys; from distribuuuu.config.reader import read_cfg; {}; sys.exit('torch' in sys.modules)"
    assert run_python("-c", code.format("read_cfg()")).returncode == 0
    wrong = "print(*read_cfg('cifar10/airbench94', ['OPTIM.LR', '1', 'TRAIN.TOPK', '0'])[1], sep='\\n')"
    done = run_python("-c", code.format(wrong))
    assert done.returncode == 0 and [line.partition(" ")[0] for line in done.stdout.splitlines()] == [
        "OPTIM.LR", "TRAIN.TOPK"]  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(write("file", "")))
    import_plugins([str(write("own.py", ""))])
