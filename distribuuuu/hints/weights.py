"""Files of weights that cannot be read: the reason without the advice to unpickle them."""

import re

# The readers of torch, timm and numpy advise to unpickle a file that they refuse. Parts of their texts are that advice,
# or have no meaning without it.
_UNSAFE_ADVICE = re.compile(
    r"weights_only`?\s*(=|set to|argument)|allow_pickle|pickle_module|safe_globals|pickle\.load|Weights only load"
)
_ADVICE_ONLY = re.compile(
    r"can still be loaded|trust|WeightsUnpickler|Unsupported global|GLOBAL [\w.]+ |unsafe pickle|torch\.load to learn"
)
_NOT_PLAIN = re.compile(r"(?:GLOBAL|Unsupported globals:|but got <class ')\s*([\w.]*\w)")


def without_unsafe_advice(text: str) -> str:
    """Return the text of an error without advice to load a file unsafely; it names what is not plain data instead."""
    if not _UNSAFE_ADVICE.search(text):
        return text
    clauses = re.split(r"(?<=[.;:!?])(?<!globals:)\s+|\s*\n\s*", text)
    kept = [clause for clause in clauses if not (_UNSAFE_ADVICE.search(clause) or _ADVICE_ONLY.search(clause))]
    shortened = " ".join(filter(None, kept))
    if named := _NOT_PLAIN.search(text):
        return f"{shortened} contains {named[1]}, which is not plain data".lstrip()
    has_reason = shortened and not shortened.endswith(":")
    return shortened if has_reason else f"{shortened} contains Python objects, which are not plain data".lstrip()


def without_foreign_advice(message: str) -> str:
    """Return a message without the advice of other libraries; its own fix stays."""
    reason, mark, fix = message.partition("; fix: ")
    return without_unsafe_advice(reason) + mark + fix
