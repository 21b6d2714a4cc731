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
import re
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

from distribuuuu.config.run_files import is_run_file
from distribuuuu.data.packed.store import PART, LostObjectError, RemoteError, Store
from distribuuuu.files.untrusted import InvalidFileError, parse_json, untrusted

STATES, OBJECTS, KEPT_STATES = "states", "objects", 3
# Limits of a state: its bytes, files, and the bytes of a file; and of a list: answers of a server.
MAX_STATE, MAX_FILES, MAX_SIZE, MAX_PAGES = 1 << 22, 10_000, 1 << 44, 20_000
_NAME = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9_.,+=@%-]{0,199}(?:/(?!$)|$)){1,5}")  # at most five parts
_SHA256, _STATE = re.compile("([0-9a-f]{64})"), re.compile(r"(\d{6}|[1-9]\d{6,8})\.json")


class Entry(NamedTuple):
    """Content of a file: its SHA-256 and its size in bytes."""

    sha256: str
    size: int

    def check(self, path: Path) -> None:
        """Raise ValueError if a file has another content."""
        with path.open("rb") as file:
            if hash_file(file) != self:
                raise ValueError("it has another content")


class State(NamedTuple):
    """State of a run: its number, the identifier of the folder that has created it, and the files by name."""

    number: int
    id: str
    files: dict[str, Entry]


class MirrorError(RemoteError):
    """The mirror of a run cannot be used or completed; trying again does not help."""

    status = 74  # EX_IOERR of sysexits.h


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
    is_valid = len(files) <= MAX_FILES and all(map(is_mirrored, files)) and _SHA256.fullmatch(content["id"])
    if not is_valid or not all(_SHA256.fullmatch(one.sha256) and 0 <= one.size < MAX_SIZE for one in files.values()):
        raise ValueError("an entry is invalid, or no file of a run")
    return State(number, content["id"], files)


def hash_file(file: IO[bytes]) -> Entry:
    """Return the hash and the size of what an open file has after its position, the beginning."""
    hashed = hashlib.sha256()
    while data := file.read(1 << 20):
        hashed.update(data)
    return Entry(hashed.hexdigest(), file.tell())


class StateLog(Store):
    """The states and the objects of a run at a URL. MirrorError: trying again does not help."""

    def _list(self, folder: str, pattern: re.Pattern) -> dict[str, datetime.datetime]:
        """Return what the group of a pattern matches in the names of a folder, with the times of the objects."""
        with self.request(folder) as store:
            pages = [*itertools.islice(store.list(folder), MAX_PAGES)]
        names = [(meta["path"].rpartition("/")[2], meta["last_modified"]) for page in pages for meta in page]
        return {found[1]: time for name, time in names if (found := pattern.fullmatch(name))}

    def read_state(self, number: int) -> State | None:
        """Return a state; None if there is none."""
        name = f"{STATES}/{number:06d}.json"
        try:
            data, _ = self.read(name, 0, MAX_STATE)
            with untrusted(f"{self.url}/{name}", "state of a run"):
                return parse_state(number, data)
        except LostObjectError:
            return None
        except InvalidFileError as error:
            raise MirrorError(f"{error}; fix: delete {name} to use the one before, or set another OUT_DIR") from error

    def find_newest(self) -> State:
        """Return the newest state; without a number if there is none, nor objects."""
        listed, newest = max(map(int, self._list(STATES, _STATE)), default=0), State(0, "", {})
        for number in range(listed or 1, listed + 11):  # created since, or missing in an old listing
            if not (found := self.read_state(number)):
                break
            newest = found
        if not newest.number and (listed or self._list(OBJECTS, _SHA256)):
            fix = "restore the newest state (if it is in mirror.json: by an earlier version), or set another OUT_DIR"
            raise MirrorError(f"{self.url}: {STATES}/ lacks a state, but {OBJECTS}/ has objects; fix: {fix}")
        return newest

    def create(self, state: State) -> State:
        """Create a state unless its number is taken; return the state that has the number."""
        entries = {name: entry._asdict() for name, entry in state.files.items()}
        data = json.dumps({"format": 2, "id": state.id, "files": entries}).encode()
        if len(state.files) > MAX_FILES or len(data) > MAX_STATE:
            raise MirrorError(f"{self.url}: OUT_DIR has more than {MAX_FILES:,} files, or long names; fix: delete some")
        name = f"{STATES}/{state.number:06d}.json"
        with contextlib.suppress(FileExistsError), self.request(name) as store:
            store.put(name, data, mode="create")
            return state
        if found := self.read_state(state.number):
            return found
        raise RemoteError(f"{self.url}/{name} exists and cannot be read")

    def upload(self, file: IO[bytes], entry: Entry) -> None:
        """Upload the beginning of an open file; OSError is raised if it has changed meanwhile."""
        name, part, hashed = f"{OBJECTS}/{entry.sha256}", max(PART, entry.size // 5000), hashlib.sha256()

        def parts() -> Iterator[bytes]:
            for start in range(0, entry.size, part):
                hashed.update(data := file.read(min(part, entry.size - start)))
                yield data

        file.seek(0)
        with self.request(name) as store:
            # A store takes at most 10,000 parts.
            store.put(name, parts(), use_multipart=entry.size > part, chunk_size=part, max_concurrency=2)
        if hashed.hexdigest() != entry.sha256:
            raise OSError(f"{file.name} has changed during its upload")

    def prune(self, newest: State) -> None:
        """Delete the states before the last KEPT_STATES, and older objects that none of these names.

        Objects of an upload that has just begun are not older; whoever begins one before the oldest kept state is
        created finds the number of his state taken.
        """
        times = self._list(STATES, _STATE)
        numbers = sorted(number for number in map(int, times) if number <= newest.number)
        dropped, kept = numbers[:-KEPT_STATES], numbers[-KEPT_STATES:]
        if not dropped:
            return
        oldest, states = times[f"{kept[0]:06d}"], [newest, *filter(None, map(self.read_state, kept))]
        named = {entry.sha256 for state in states for entry in state.files.values()}
        objects = self._list(OBJECTS, _SHA256).items()
        gone = [f"{OBJECTS}/{sha}" for sha, time in objects if sha not in named and time < oldest]
        with self.request(STATES) as store:
            store.delete([*gone, *(f"{STATES}/{number:06d}.json" for number in dropped)])
