"""The search for near-duplicates: close pairs are not missed, and few pairs are compared."""

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from distribuuuu.commands.scan import duplicates
from distribuuuu.commands.scan.duplicates import RADIUS, find_groups, find_near_pairs
from distribuuuu.commands.scan.scan import scan_images
from distribuuuu.data.datasets.base import ImageDataset
from distribuuuu.data.decode import DEFAULTS


class Pictures(ImageDataset):
    classes = ("one",)

    def __init__(self, images):
        self.images, self.labels = images, [0] * len(images)

    def read(self, index):
        return self.images[index]


def photo(seed: int, size=(160, 120)) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (9, 12, 3), np.uint8)
    return Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)


def groups_of(*images) -> list[list[int]]:
    scan = scan_images({"all": Pictures(images)}, DEFAULTS, 0, lambda num: None)
    return find_groups(scan, DEFAULTS)


def all_pairs(hashes: np.ndarray) -> set[tuple[int, int, int]]:
    bits = np.unpackbits(hashes, axis=1).astype(int)
    distances = (bits[:, None] != bits[None]).sum(2)
    rows, columns = np.where(np.triu(distances <= RADIUS, 1))
    return {(row, column, distances[row, column]) for row, column in zip(rows.tolist(), columns.tolist(), strict=True)}


def test_the_search_finds_the_pairs_within_the_radius():
    random = np.random.default_rng(0)
    hashes = random.integers(0, 256, (600, 16), np.uint8)
    for number in range(300):  # copies with 0 to 19 changed bits
        bits = np.unpackbits(hashes[number])
        bits[random.choice(128, number % 20, replace=False)] ^= 1
        hashes[599 - number] = np.packbits(bits)
    expected = all_pairs(hashes)
    found = {tuple(pair) for pair in find_near_pairs(hashes).tolist()}
    assert found <= expected and {pair for pair in expected if pair[2] <= 7} <= found
    assert len(found) > 0.9 * len(expected) and max(distance for *_, distance in found) > 9


def test_the_search_is_bounded_if_most_hashes_are_alike(monkeypatch):
    assert all(find_near_pairs(np.zeros((num, 16), np.uint8)).shape == (0, 3) for num in (0, 1))
    monkeypatch.setattr(duplicates, "MAX_NEIGHBORS", 4)
    pairs = find_near_pairs(np.zeros((300, 16), np.uint8))
    assert len(pairs) == 4 * 300 - 10 and {*pairs[:, 0], *pairs[:, 1]} == set(range(300))


def test_changed_copies_are_found_and_mirror_images_and_large_crops_are_none():
    image = photo(0, (400, 300))
    copies = [
        image.resize((200, 150)), image.resize((800, 600)), image.resize((224, 224)), image.convert("L"),
        ImageEnhance.Brightness(image).enhance(1.2), image.crop((1, 1, 399, 299)),
    ]  # fmt: skip
    for copy in copies:
        assert groups_of(image, photo(1), copy, photo(2)) == [[0, 2]]
    assert groups_of(image, ImageOps.mirror(image), image.crop((80, 60, 400, 300)), photo(1)) == []


def test_equal_shapes_of_another_color_are_not_copies():
    def draw(color):
        image = Image.new("RGB", (90, 90), "white")
        ImageDraw.Draw(image).polygon([(10, 70), (50, 10), (80, 40), (60, 85)], fill=color)
        return image

    red, green = draw((200, 0, 0)), draw((0, 110, 0))
    assert groups_of(red, green) == [], "although their hashes are alike"
    assert groups_of(red, draw((190, 0, 0))) == [[0, 1]]
    assert groups_of(red, red.convert("L")) == [[0, 1]]


def test_images_of_one_color_are_copies_only_if_they_are_identical():
    white, gray = Image.new("RGB", (50, 50), "white"), Image.new("RGB", (50, 50), (90, 90, 90))
    assert groups_of(white, gray, white.copy(), white.resize((40, 40))) == [[0, 2]]


def test_groups_join_by_way_of_others():
    image = photo(3, (400, 300))
    scan = scan_images(
        {"a": Pictures([image, photo(4)]), "b": Pictures([image.convert("L"), image.copy()])},
        DEFAULTS, 0, lambda num: None,
    )  # fmt: skip
    assert find_groups(scan, DEFAULTS) == [[0, 2, 3]]
