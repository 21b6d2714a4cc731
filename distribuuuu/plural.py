"""Numbers with their nouns, for messages."""


def counted(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural, e.g. '1 image', '2,000 images', '3 classes'."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "sh", "tch", "x")) else "s"
    return f"{number:,} {noun}{ending}"
