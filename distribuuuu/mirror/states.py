"""Log of the states of a mirrored run, with the objects that they name.

    URL/states/000123.json  state 123: its id, and name -> SHA-256 and size of each file; created if the number is free
    URL/objects/SHA256      the content of a file; never overwritten with another one

Nothing that arrives late can replace anything. A store is not trusted: a state has limits, its names are files of a
run, and content is used after its hash matches.
"""

import contextlib
import datetime
import hashlib
import itertools
import json
import operator
import re
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple

from distribuuuu.config.run_files import is_run_file
from distribuuuu.data.packed.store import (
    PART,
    LostObjectError,
    RemoteError,
    explain,
    open_store,
    read_parts,
    read_range,
)
from distribuuuu.files.untrusted import InvalidFileError, parse_json, untrusted

STATES, OBJECTS = "states", "objects"
# States of which nothing is deleted; an object that no state names may belong to an upload that has just begun.
KEPT_STATES, UNNAMED = 3, datetime.timedelta(days=1)
# Limits of a state: its bytes, files, and the bytes of a file; and of a list: answers of a server.
MAX_STATE, MAX_FILES, MAX_SIZE, MAX_PAGES = 1 << 22, 10_000, 1 << 44, 20_000
# Parts of a multipart upload at most (S3: 10,000).
MAX_PARTS = 5000
# Seconds after which a request has failed, and of failures after which no other attempt begins.
REQUEST_S, RETRY_S = 60.0, 30.0
# At most five parts.
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.,+=@%-]{0,199}(?:/(?!$)|$)){1,5}")
_SHA256 = re.compile("[0-9a-f]{64}")


class Entry(NamedTuple):
    """Content of a file: its SHA-256 and its size in bytes."""

    sha256: str
    size: int


class State(NamedTuple):
    """State of a run: its number, the identifier of the folder that has created it, and the files by name."""

    number: int
    id: str
    files: dict[str, Entry]

    @property
    def objects(self) -> set[str]:
        """The names of its objects."""
        return {entry.sha256 for entry in self.files.values()}


class MirrorError(Exception):
    """A state is damaged, or another run has written to the URL; trying again does not help."""


def is_mirrored(name: str) -> bool:
    """Tell whether a file is mirrored, by its path relative to OUT_DIR with `/`: those of a run, no hidden ones."""
    if not _NAME.fullmatch(name) or name.endswith((".tmp", ".partial", ".broken")):
        return False
    return is_run_file(name.partition("/")[0]) or "/" not in name and name.endswith((".yaml", ".yml"))


def parse_state(number: int, data: bytes) -> State:
    """Return the state in a JSON text; raise an exception if it is none, exceeds a limit or names other files."""
    content = parse_json(data)
    if content["format"] != 2:
        raise ValueError("it has another format; fix: use a newer version of distribuuuu")
    files = {name: Entry(entry["sha256"], entry["size"]) for name, entry in content["files"].items()}
    is_valid = all(_SHA256.fullmatch(entry.sha256) and 0 <= entry.size < MAX_SIZE for entry in files.values())
    is_valid = is_valid and len(files) <= MAX_FILES and all(map(is_mirrored, files))
    if not (is_valid and _SHA256.fullmatch(content["id"])):
        raise ValueError("an entry is invalid, or no file of a run")
    return State(number, content["id"], files)


class StateLog:
    """The states and the objects of a run at a URL.

    Its methods raise MirrorError, RemoteError for what trying again does not help, and OSError otherwise.
    """

    def __init__(self, url: str):
        self.url = url

    def _call(self, name: str, function: Callable[[Any], Any]) -> Any:
        """Return the result of a function of the store of obstore."""
        try:
            return function(open_store(self.url, REQUEST_S, RETRY_S))
        except Exception as error:
            raise explain(error, f"{self.url}/{name}") from error

    def _list(self, folder: str, pattern: str) -> dict[str, Any]:
        """Return what the group of a pattern matches in the names of a folder, with the times of the objects."""
        try:
            pages = self._call(folder, lambda store: [*itertools.islice(store.list(folder), MAX_PAGES)])
        except LostObjectError as error:
            raise RemoteError(f"{self.url}: the bucket does not exist; fix: create it, or check the URL") from error
        names = [(meta["path"].rpartition("/")[2], meta["last_modified"]) for page in pages for meta in page]
        return {found[1]: time for name, time in names if (found := re.fullmatch(pattern, name))}

    def _numbers(self) -> list[int]:
        return [int(number) for number in self._list(STATES, r"(\d{6,9})\.json")]

    def read(self, number: int) -> State | None:
        """Return a state; None if there is none."""
        name = f"{STATES}/{number:06d}.json"
        try:
            part = read_range(self.url, name, 0, MAX_STATE, REQUEST_S, RETRY_S)
            with untrusted(f"{self.url}/{name}", "state of a run"):
                if part.size > MAX_STATE:
                    raise ValueError(f"it has {part.size:,} bytes, more than {MAX_STATE:,}")
                return parse_state(number, part.data)
        except LostObjectError:
            return None
        except InvalidFileError as error:
            fix = f"delete {name} to use the state before it, or set another OUT_DIR"
            raise MirrorError(f"{error}; fix: {fix}") from error

    def find_newest(self) -> State | None:
        """Return the newest state; None if there is none, nor objects."""
        number = max(self._numbers(), default=0)
        newest = self.read(number)
        for _ in range(10):  # created since, or missing in an old listing
            if (newer := self.read(number + 1)) is None:
                break
            number, newest = number + 1, newer
        if newest is None and (number or self._list(OBJECTS, "(.*)")):
            fix = f"restore the newest state, delete {OBJECTS}/ if no run is to be kept, or set another OUT_DIR"
            raise MirrorError(f"{self.url}: {STATES}/ lacks a state, but {OBJECTS}/ has objects; fix: {fix}")
        return newest

    def create(self, state: State) -> State:
        """Create a state unless its number is taken; return the state that has the number."""
        entries = {name: entry._asdict() for name, entry in state.files.items()}
        data = json.dumps({"format": 2, "id": state.id, "files": entries}).encode()
        name = f"{STATES}/{state.number:06d}.json"
        with contextlib.suppress(FileExistsError):
            self._call(name, lambda store: store.put(name, data, mode="create"))
            return state
        if found := self.read(state.number):
            return found
        raise OSError(f"{name} exists and cannot be read")

    def upload(self, file: IO[bytes], entry: Entry) -> None:
        """Upload the beginning of an open file; OSError is raised if it has changed meanwhile."""
        name, part, hashed = f"{OBJECTS}/{entry.sha256}", max(PART, entry.size // MAX_PARTS), hashlib.sha256()

        def parts() -> Iterator[bytes]:
            for start in range(0, entry.size, part):
                hashed.update(data := file.read(min(part, entry.size - start)))
                yield data

        file.seek(0)
        content = parts() if entry.size > part else b"".join(parts())
        self._call(name, lambda store: store.put(name, content, chunk_size=part, max_concurrency=2))
        if hashed.hexdigest() != entry.sha256:
            raise OSError(f"{file.name} has changed during its upload")

    def download(self, entry: Entry, write: Callable[[bytes], Any]) -> None:
        """Read an object in parts and pass each to `write`; raise LostObjectError if it is not what it should be."""
        name, hashed = f"{OBJECTS}/{entry.sha256}", hashlib.sha256()
        for data in read_parts(self.url, name, entry.size, REQUEST_S, RETRY_S):
            hashed.update(data)
            write(data)
        if hashed.hexdigest() != entry.sha256:
            raise LostObjectError(f"{self.url}/{name}: it has another content")

    def prune(self, newest: State) -> None:
        """Delete the states before the last KEPT_STATES, and the objects that only they name, or none since a day."""
        numbers = sorted((number for number in self._numbers() if number < newest.number), reverse=True)
        states = [newest, *filter(None, map(self.read, numbers))]
        kept, dropped = states[:KEPT_STATES], states[KEPT_STATES:]
        named = {sha for state in kept for sha in state.objects}
        old = {sha for state in dropped for sha in state.objects}
        times = self._list(OBJECTS, f"({_SHA256.pattern})")
        day_before = max(times.values(), default=datetime.datetime.max) - UNNAMED
        gone = [sha for sha, at in times.items() if sha not in named and (sha in old or at < day_before)]
        # The states go last: a kill in between repeats the rest.
        for paths in ([f"{OBJECTS}/{sha}" for sha in gone], [f"{STATES}/{state.number:06d}.json" for state in dropped]):
            if paths:
                self._call(paths[0], operator.methodcaller("delete", paths))
