"""Workers: processes, threads or none make the same batches, say what went wrong, and leave nothing behind."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
from concurrent import futures
from unittest import mock

import numpy as np
import pytest
import torch
from support.batches import ALONE, CPU
from support.images import draw_folder
from support.runs import ROOT, run_tool, small_options

from distribuuuu.config import ConfigError, load_cfg
from distribuuuu.data import workers
from distribuuuu.data.batch import LoaderWorkerError, Pass, Samples
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.loader import BadImageError, build_loader, start_workers
from distribuuuu.data.samplers import EvalSampler
from distribuuuu.data.transforms import CenterCrop
from distribuuuu.trainer import train_model

# Ways of making batches, with more and with fewer workers than cores.
WAYS = [("process", 0), ("process", 1), ("process", 3), ("thread", 1), ("thread", 3)]
SOME_WAYS = [("process", 0), ("process", 2), ("thread", 2)]


def way_words(kind: str, num: int) -> tuple:
    return ("DATA.WORKER_KIND", kind, "TRAIN.WORKERS", num)


class Squares(ImageDataset):
    """Gray squares, each of its number."""

    classes, labels = ("even", "odd"), np.arange(40) % 2

    def read(self, index: int) -> np.ndarray:
        return np.full((8, 8, 3), index, dtype=np.uint8)


def start(kind: str, num: int, images: ImageDataset | None = None, transform=None, batch_size: int = 4,
          batch_bytes: int = 0):  # fmt: skip
    """Return the batches of an evaluation set, the sampler's position always at its beginning."""
    images = images or Squares()
    samples = Samples(images, transform or CenterCrop(8, 8), "auto", skip_broken=False)
    sampler = EvalSampler(len(images), batch_size, 0, 1)
    return start_workers([Pass(samples, sampler)], kind, num, False, batch_bytes)[0]


def numbers_of(batches) -> list[list[int]]:
    """Return the numbers of the squares of each batch."""
    return [batch.images[:, 0, 0, 0].tolist() for batch, _ in batches]


EXPECTED = [list(range(begin, begin + 4)) for begin in range(0, 40, 4)]


def same_batches(one, other) -> bool:
    pairs = list(zip(one, other, strict=True))
    return bool(pairs) and all(all(map(torch.equal, a[:3], b[:3])) for a, b in pairs)


@pytest.fixture(scope="module")
def reference(image_folder, tmp_path_factory):
    """The batches of two epochs as a loader without workers makes them."""
    cfg = load_cfg(None, small_options(image_folder, tmp_path_factory.mktemp("reference")))
    loader = build_loader(cfg, ALONE, CPU, train=True)
    return [list(loader.batches_from(3, epoch, 0)) for epoch in range(2)]


@pytest.fixture
def own_children():
    """Return own_children(): the processes that were started since the beginning of the test."""
    before = {child.pid for child in multiprocessing.active_children()}
    return lambda: {child.pid for child in multiprocessing.active_children()} - before


@pytest.mark.parametrize("kind, num", WAYS)
def test_an_epoch_is_entered_at_any_step_and_left_at_any(small_cfg, reference, kind, num):
    loader = build_loader(small_cfg(*way_words(kind, num)), ALONE, CPU, train=True)
    for epoch, first_step, taken in ((0, 0, 1), (1, 2, 1), (0, 1, 0), (1, 0, 4), (0, 4, 0)):
        batches = loader.batches_from(3, epoch, first_step)
        here = [next(batches) for _ in range(taken)]
        del batches
        expected = reference[epoch][first_step : first_step + taken]
        assert not taken or same_batches(here, expected), (epoch, first_step)
    assert same_batches(loader.batches_from(3, 1, 0), reference[1])
    assert same_batches(loader.batches_from(3, 0, 2), reference[0][2:])


class Fails(Squares):
    def read(self, index: int) -> np.ndarray:
        if index == 9:
            raise ConfigError("TRAIN.DATASET: the share is gone; fix: mount it")
        return super().read(index)


@pytest.mark.parametrize("kind, num", SOME_WAYS)
def test_an_error_of_a_worker_reaches_who_waits_for_its_batch_and_the_workers_go_on(kind, num):
    batches = start(kind, num, Fails())
    for _ in range(2):
        running = iter(batches)
        assert numbers_of([next(running), next(running)]) == EXPECTED[:2]
        with pytest.raises(ConfigError, match="^TRAIN.DATASET: the share is gone; fix: mount it$"):
            next(running)


def test_threads_begin_no_batch_after_an_error(monkeypatch):
    seen, batches = [], start("thread", 1, Fails())
    monkeypatch.setattr(Squares, "read", lambda self, index: seen.append(index) or np.zeros((8, 8, 3), np.uint8))
    with pytest.raises(ConfigError):
        list(batches)
    futures.wait(batches.pool._submitted, 60)
    assert seen == [*range(9)]


@pytest.fixture
def slots(monkeypatch) -> list[int | None]:
    """The slots of the shared memory that batches got, in order; None: no slot was free."""
    found, reserve = [], workers.BatchMemory.reserve
    monkeypatch.setattr(workers.BatchMemory, "reserve", lambda self: found.append(reserve(self)) or found[-1])
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="processes share memory on Linux only")
@pytest.mark.parametrize("batch_bytes", [4 * 8 * 8 * 3, 4 * 8 * 8 * 3 - 1])
def test_batches_that_are_kept_are_not_overwritten_and_all_memory_is_reused(batch_bytes, slots):
    batches = start("process", 2, batch_bytes=batch_bytes)
    kept = list(batches)  # more than there are slots
    assert numbers_of(kept) == EXPECTED and all((images == images[:, :1, :1, :1]).all() for (images, *_), _ in kept)
    assert [batch.targets.tolist() for batch, _ in kept] == [[0, 1, 0, 1]] * 10
    assert {*slots} - {None} == set(range(6)) and (None in slots) == (batch_bytes == 4 * 8 * 8 * 3)
    part = kept[0][0].images[1:, :, 2]
    del kept
    for _ in range(2):
        assert numbers_of(batches) == EXPECTED and part.unique().tolist() == [1, 2, 3]
        next(iter(batches))  # the batches made ahead are discarded
    slots.clear()
    assert numbers_of(batches) == EXPECTED
    assert len({*slots} - {None}) == 6 - (batch_bytes == 4 * 8 * 8 * 3)  # one is that of the kept batch
    del part
    slots.clear()
    assert numbers_of(batches) == EXPECTED and {*slots} == set(range(6))


@pytest.mark.parametrize("kind, num", SOME_WAYS)
def test_lack_of_memory_is_no_broken_image(kind, num):
    class Large(Squares):
        def read(self, index: int) -> np.ndarray:
            raise MemoryError

    with pytest.raises(LoaderWorkerError, match="^loading image 0 ran out of memory; fix: set fewer TRAIN.WORKERS"):
        list(start(kind, num, Large()))


@pytest.mark.parametrize("kind, num", [("process", 2), ("thread", 2)])
def test_pinned_batches_are_the_same_and_a_dead_worker_is_an_error(monkeypatch, own_children, kind, num):
    threads = set()
    pin = lambda tensor: threads.add(threading.current_thread()) or tensor.clone()  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    samples = Samples(Squares(), CenterCrop(8, 8), "auto", skip_broken=False)
    (batches,) = start_workers([Pass(samples, EvalSampler(40, 4, 0, 1))], kind, num, pin_memory=True, batch_bytes=768)
    assert numbers_of(batches) == EXPECTED
    next(iter(batches))
    assert numbers_of(batches) == EXPECTED and threads and threading.current_thread() not in threads
    for pid in own_children():
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LoaderWorkerError, match="SIGKILL"):
            list(batches)


DYING = """
import multiprocessing, os, runpy, signal, sys
from distribuuuu.data.batch import Samples
make, num, rank, place = Samples.make, int(os.environ["NUM"]), os.environ["DYING"], os.environ.get("RANK", "0")

def make_or_die(self, key, *rest):
    if multiprocessing.parent_process() and len(self.images) == num and place == rank and key[1] == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return make(self, key, *rest)

Samples.make = make_or_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("num, nproc, rank", [(48, 1, 0), (37, 2, 1)])
def test_a_run_whose_worker_is_killed_ends_with_one_message(image_folder, tmp_path, num, nproc, rank):
    """While it trains on 48 images, or evaluates on 37."""
    (tmp_path / "dying.py").write_text(DYING)
    own = ("TRAIN.WORKERS", 1, "TRAIN.BATCH_SIZE", 6, "OPTIM.MAX_EPOCH", 1)
    words = small_options(image_folder, tmp_path / "out", *own)
    environment = {"NUM": str(num), "DYING": str(rank), "PYTHONPATH": str(ROOT)}
    tool = (tmp_path / "dying.py", ROOT / "tools" / "train_net.py")
    done = run_tool(*tool, "--nproc", nproc, *words, **environment)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("was killed by SIGKILL: the system may have run out of memory; fix: set fewer") == 1
    assert "Traceback" not in done.stderr and "see below" not in done.stderr


@pytest.mark.parametrize("used", [0, 2])
def test_workers_end_with_their_loader(used, own_children):
    batches = start("process", 2)
    assert len(own_children()) == 2
    for _ in range(used):
        next(iter(batches))
    del batches
    gc.collect()
    assert not own_children()


class CountsThreads(Squares):
    """Pixels that say how many threads the tensors of a worker are computed by."""

    def read(self, index: int) -> np.ndarray:
        return np.full((8, 8, 3), torch.get_num_threads(), dtype=np.uint8)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind, num, wanted", [("thread", 1, 1), ("thread", 3, 1), ("process", 2, 1), ("thread", 0, 3)])
def test_a_worker_computes_on_one_thread_and_the_model_on_as_many_as_before(three_threads, kind, num, wanted):
    batches = start(kind, num, CountsThreads())
    for _ in range(2):
        assert {number for batch in numbers_of(batches) for number in batch} == {wanted}
        assert torch.get_num_threads() == 3
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [3]


@pytest.mark.parametrize("way", SOME_WAYS)
def test_a_bad_file_is_named_or_skipped_counted_and_replaced_alike(small_cfg, tmp_path, caplog, way):
    root = tmp_path / "data"
    draw_folder(root, "train", {"ant": 12, "bee": 12})
    draw_folder(root, "val", {"ant": 2, "bee": 2})
    words = ("TRAIN.DATASET", root, "MODEL.NUM_CLASSES", 2, "TRAIN.BATCH_SIZE", 6, "DATA.ON_BAD_IMAGE")
    skipping, alone, strict = (
        build_loader(small_cfg(*words, *more), ALONE, CPU, train=True)
        for more in (("skip", *way_words(*way)), ("skip",), ("raise", *way_words(*way)))
    )
    whole = list(skipping.batches_from(3, 0, 0))
    assert skipping.num_broken == 0
    file = root / "train" / "bee" / "005.jpg"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(BadImageError, match=r"bee/005\.jpg: \w+: .*set DATA\.ON_BAD_IMAGE skip"):
        list(strict.batches_from(3, 0, 0))
    here = list(skipping.batches_from(3, 0, 0))
    assert skipping.num_broken == 1 and "broken image (1 so far)" in caplog.text
    assert sum(int((a.images != b.images).flatten(1).any(1).sum()) for a, b in zip(whole, here, strict=True)) == 1
    assert same_batches(alone.batches_from(3, 0, 0), here)
    for path in (root / "train").rglob("*.jpg"):
        path.unlink()
    said = "missing image: .*the file does not exist; fix: restore it"
    with pytest.raises(BadImageError, match=said):  # nothing can be put in place of an image
        list(skipping.batches_from(3, 0, 0))


class Changing(CenterCrop):
    """A transform that returns images of two sizes or of two types."""

    def __call__(self, image, rng):
        if self.interpolation == "sizes":
            return torch.ones(3, 1 + int(image.pixels()[0, 0, 0]) % 2, 1, dtype=torch.uint8)
        return torch.full((3, 8, 8), 0.5)


@pytest.mark.parametrize("kind, num", SOME_WAYS)
def test_images_of_a_batch_are_alike_and_of_any_type(kind, num):
    with pytest.raises(ValueError, match=r"returned different images: .*\[3, 1, 1\].*\[3, 2, 1\]"):
        list(start(kind, num, transform=Changing(8, 8, "sizes"), batch_bytes=4 * 8 * 8 * 3))
    for (pixels, *_), _ in start(kind, num, transform=Changing(8, 8), batch_bytes=4 * 8 * 8 * 3):
        assert pixels.dtype == torch.float32 and pixels.unique().tolist() == [0.5]


def test_a_run_requests_the_passes_it_expects(small_cfg):
    """Batches that were made ahead are discarded at its start alone."""
    with mock.patch.object(workers.ThreadPool, "clear", autospec=True) as clear:
        train_model(small_cfg("EMA.HALF_LIFE", 5, "TRAIN.WORKERS", 2, "DATA.WORKER_KIND", "thread"))
    assert clear.call_count == 1
