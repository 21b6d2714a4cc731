"""Words that an option does not allow: the entry that is meant, or the allowed ones."""

from collections.abc import Sequence

from distribuuuu.config.errors import did_you_mean

# Names of data sets elsewhere -> the data set here, and what it reads.
DATA_NAMES = {
    "webdataset wds tar tars zip shards": "archive, which reads shards of tar files, {000..009}.tar, and ZIP files",
    "csv tsv txt table file-list filelist kaggle dataframe": "list, which reads DATASET/SPLIT.csv",
    "huggingface hf hf-datasets datasets hub arrow": "parquet, which `distribuuuu pack` imports",
    "folder folders directory image-folder imagefolders": "imagefolder, for one sub-folder per class",
    "ilsvrc ilsvrc2012 imagenet1k imagenet-1k": "imagenet, for its archives, or imagefolder, for class folders",
}
_BY_DATA_NAME = {name: words for names, words in DATA_NAMES.items() for name in names.split()}


def describe_wrong_word(word: object, allowed: Sequence[str], kind: str) -> str:
    """Return the message for a value that is not among the allowed words, or names of registered entries of a kind."""
    if kind == "data set" and (meant := _BY_DATA_NAME.get(normalized(str(word)))):
        return f"got {word!r}; did you mean {meant}?"
    families = dict.fromkeys(f"{one.partition('/')[0]}/NAME" if "/" in one else one for one in allowed if one)
    own = "; fix: name the file of an entry of your own in PLUGINS" if kind else ""
    return f"got {word!r}; expected one of {', '.join(families)}{did_you_mean(str(word), allowed) or own}"


def normalized(name: str) -> str:
    """Return a flag or a part of a key in lower case, with dashes between its words only."""
    return name.lower().replace("_", "-").strip("-")
