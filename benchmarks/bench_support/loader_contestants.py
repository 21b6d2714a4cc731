#!/usr/bin/env python3
"""Process with one data loader: for each line of standard input it runs one pass and prints the measurement.

    python benchmarks/bench_support/loader_contestants.py NAME '{"folder": ..., ...}'

Each loader function below returns a function that runs one pass over the images and returns their number. The first
pass is a warm-up and is not printed.
"""

import functools
import itertools
import json
import os
import sys
import time
import warnings

# The side of an image, which the argument "size" sets; the side before a center crop; and the images of a batch.
SIZE, RESIZE, BATCH = 224, 256, 64
# Passes, from the first one on, for which the floor draws the crops.
PASSES = 12
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def torchvision_v1(folder, workers=0, train=True):
    """Build the reference: PIL, torchvision v1 transforms, float32."""
    from torchvision import transforms as T
    from torchvision.datasets import ImageFolder

    crop = [T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip()] if train else [T.Resize(RESIZE), T.CenterCrop(SIZE)]
    transform = T.Compose([*crop, T.ToTensor(), T.Normalize(MEAN, STD)])
    return _data_loader(ImageFolder(f"{folder}/{'train' if train else 'val'}", transform), workers, train)


def torchvision_v2(folder, workers=0, train=True):
    """Build torchvision's decoder with v2 transforms, uint8."""
    from torchvision.datasets import ImageFolder

    decode, crop = _decode_uint8(train)
    return _data_loader(ImageFolder(f"{folder}/{'train' if train else 'val'}", crop, loader=decode), workers, train)


def _decode_uint8(train=True):
    """Return torchvision's decoder, of a path or of bytes in a tensor, and its v2 transforms."""
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    if train:
        crop = v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip()
    else:
        crop = v2.Resize(RESIZE), v2.CenterCrop(SIZE)
    return functools.partial(decode_image, mode=ImageReadMode.RGB), v2.Compose(crop)


def _data_loader(images, workers, train):
    from torch.utils.data import DataLoader

    loader = DataLoader(images, BATCH, shuffle=train, num_workers=workers, persistent_workers=workers > 0)
    return lambda: sum(len(batch) for batch, _ in loader)


def timm(folder, workers=0):
    """Build timm's reader, transforms and loader, without its GPU prefetcher."""
    from timm.data import create_dataset, create_loader

    images = create_dataset("", root=f"{folder}/train", is_training=True)
    loader = create_loader(
        images, (3, SIZE, SIZE), BATCH, is_training=True, use_prefetcher=False, num_workers=workers,
        persistent_workers=workers > 0, color_jitter=None, auto_augment=None, interpolation="bilinear",
    )  # fmt: skip
    return lambda: sum(len(batch) for batch, _ in loader)


def webdataset(folder, uint8=False):
    """Build a webdataset loader: a tar of the same JPEGs, with PIL and torchvision v1 transforms, or v2 and uint8."""
    import torch
    import webdataset as wds
    from torchvision import transforms as T

    decode, crop = _decode_uint8()

    def decode_and_crop(jpeg):
        return crop(decode(torch.frombuffer(bytearray(jpeg), dtype=torch.uint8)))

    transform = T.Compose([T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)])
    tar = f"{folder}/train.tar"
    if not os.path.exists(tar):
        with wds.TarWriter(tar) as writer:
            for number, (path, label) in enumerate(_files(folder)):
                with open(path, "rb") as file:
                    writer.write({"__key__": f"{number:06d}", "jpg": file.read(), "cls": label})
    images = wds.WebDataset(tar, shardshuffle=False).shuffle(1000)
    images = (images if uint8 else images.decode("pil")).to_tuple("jpg", "cls")
    loader = images.map_tuple(decode_and_crop if uint8 else transform, int).batched(BATCH)
    return lambda: sum(len(batch) for batch, _ in loader)


def dali(folder):
    """Build a DALI pipeline on one CPU thread: fused decoding and cropping, resize, uint8."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None, prefetch_queue_depth=1)
    def pipeline():
        jpegs, labels = fn.readers.file(file_root=f"{folder}/train", random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(jpegs, device="cpu")
        images = fn.resize(images, size=[SIZE, SIZE], antialias=True)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    pipe = pipeline()
    pipe.build()
    size = pipe.epoch_size("reader")

    def run_pass():
        for _ in range(-(-size // BATCH)):
            pipe.run()
        return -(-size // BATCH) * BATCH

    return run_pass


def ffcv(folder, mode, workers=1):
    """Build ffcv on the 256 px images of FOLDER/pixels.npz, as JPEGs of quality 90 or raw."""
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    with np.load(f"{folder}/pixels.npz") as file:  # read everything now: the writer forks
        pixels = [file[name] for name in file.files]
    beton = f"{folder}/{mode}.beton"

    class Images:
        def __len__(self):
            return len(pixels)

        def __getitem__(self, index):
            return pixels[index], index % 10

    field = RGBImageField(write_mode=mode, jpeg_quality=90)
    DatasetWriter(beton, {"image": field, "label": IntField()}, num_workers=0).from_indexed_dataset(Images())
    crop = RandomResizedCropRGBImageDecoder((SIZE, SIZE))
    pipelines = {
        "image": [crop, RandomHorizontalFlip(), ToTensor(), ToTorchImage()],
        "label": [IntDecoder(), ToTensor()],
    }
    order = OrderOption.RANDOM
    loader = Loader(beton, BATCH, num_workers=workers, order=order, os_cache=True, drop_last=False, pipelines=pipelines)
    return lambda: sum(len(batch) for batch, _ in loader)


def _build_ours(folder, overrides, workers, train):
    """Return the loader of this package."""
    import torch

    from distribuuuu.config import load_cfg
    from distribuuuu.data.loader import build_loader
    from distribuuuu.launch.detect import Launch
    from distribuuuu.launch.host import tune_malloc

    tune_malloc()
    overrides = ["TRAIN.DATASET", folder, "TRAIN.WORKERS", workers, "TRAIN.BATCH_SIZE", BATCH,
                 "TEST.BATCH_SIZE", BATCH, *overrides]  # fmt: skip
    cfg = load_cfg(None, [str(value) for value in overrides])
    return build_loader(cfg, Launch("alone"), torch.device("cpu"), train)


def ours(folder, overrides=(), workers=0, train=True, to_loop=False):
    """Build the loader of this package; it returns float32 batches if `to_loop`, else the uint8 output of a worker."""
    loader = _build_ours(folder, overrides, workers, train)
    epochs = iter(range(10**6))

    def run_pass():
        if train:
            loader.sampler.set_position(1, next(epochs), 0)
        in_worker = (batch for batch, _ in map(loader.samples.batch, loader.sampler))
        return sum(len(batch.images) for batch in (loader if to_loop else in_worker))

    return run_pass


def floor(folder, overrides=(), workers=0):
    """Build what every loader with our decoder and resizing has to do: files in memory, and the crops drawn before.

    These are the calls that decode a region, resize it, copy it into the batch and, with workers, normalize the batch.
    The crops are those of `ours`: in each round both read the same regions.
    """
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from distribuuuu.data.batch import Normalizer
    from distribuuuu.data.decode import open_lazy_image
    from distribuuuu.data.seeding import SampleRNG
    from distribuuuu.data.transforms import draw_flips, random_resized_box, resize

    loader, normalize = _build_ours(folder, overrides, 0, True), Normalizer(torch.device("cpu"), MEAN, STD, False)
    images, decoder, transform = loader.images, loader.samples.decoder, loader.samples.transform
    encoded = [open_lazy_image(bytearray(images.read(index)), decoder) for index in range(len(images))]

    def draw(key):
        image, rng = encoded[key[1]], SampleRNG(*key)
        draw_flips(rng, transform)
        return image, random_resized_box(rng, *image.size, transform.scale)

    def draw_epoch(epoch):
        loader.sampler.set_position(1, epoch, 0)
        return [[draw(key) for key in keys] for keys in loader.sampler]

    def make_batch(crops):
        torch.set_num_threads(1)
        batch = torch.empty(len(crops), SIZE, SIZE, 3, dtype=torch.uint8)
        for pixels, (image, box) in zip(batch, crops, strict=True):
            pixels.copy_(resize(image.crop(box), SIZE, SIZE).permute(1, 2, 0))
        return batch.permute(0, 3, 1, 2)

    epochs = itertools.cycle([draw_epoch(epoch) for epoch in range(PASSES)])
    if not workers:
        return lambda: sum(len(make_batch(crops)) for crops in next(epochs))
    pool = ThreadPoolExecutor(workers)

    def run_pass():
        batches = next(epochs)
        num, running = 0, [pool.submit(make_batch, crops) for crops in batches[: 2 * workers]]
        for crops in [*batches[2 * workers :], *[()] * len(running)]:
            num += len(normalize(running.pop(0).result()))
            if crops:
                running.append(pool.submit(make_batch, crops))
        return num

    return run_pass


def _files(folder):
    """Return (path, label) of each training image."""
    classes = sorted(os.listdir(f"{folder}/train"))
    return [
        (f"{folder}/train/{name}/{file}", label)
        for label, name in enumerate(classes)
        for file in sorted(os.listdir(f"{folder}/train/{name}"))
    ]


def main() -> None:
    """Run the warm-up pass, then one pass for each line."""
    warnings.simplefilter("ignore")
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    global SIZE
    SIZE = arguments.pop("size", SIZE)
    import torch

    if arguments.pop("one_core", False):
        torch.set_num_threads(1)
    run_pass = globals()[name](**arguments)
    run_pass()
    print("ready", flush=True)
    for _ in sys.stdin:
        cpu, wall = time.process_time(), time.perf_counter()
        images = run_pass()
        measurement = {"images": images, "cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}
        print(json.dumps(measurement), flush=True)


if __name__ == "__main__":
    main()
