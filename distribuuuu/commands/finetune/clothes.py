"""The photographs `clothes`, which come with the package: 40 of each of ten classes, a first try of `finetune`.

They are the first 40 training images of each class of clothing-dataset-small (github.com/alexeygrigorev, CC0 1.0) after
a shuffle, resized to a shorter side of 160 pixels.
"""

import zipfile
from pathlib import Path

from distribuuuu.config import ConfigError
from distribuuuu.files.cache_folder import cache_folder
from distribuuuu.files.locks import take_turn
from distribuuuu.files.new_folder import new_folder

NAME = "clothes"


def unpack_clothes() -> Path:
    """Return the folder of the photographs in the user's cache, with a folder for each class; unpack it once.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    folder = cache_folder() / NAME
    try:
        with take_turn(folder):
            if not folder.is_dir():
                with new_folder(folder) as part, zipfile.ZipFile(Path(__file__).with_suffix(".zip")) as archive:
                    archive.extractall(part)
    except OSError as error:
        raise ConfigError(f"FOLDER: {NAME} cannot be unpacked into {folder}: {error.strerror or error}") from error
    return folder
