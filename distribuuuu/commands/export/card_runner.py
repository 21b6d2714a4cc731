"""Script that runs the Python code of a model card on image files, in a process of its own.

    python card_runner.py CODE NUM < FILES

CODE is a file; its `predict(path)` returns pairs of a class and its probability, the most probable class first. FILES
is a JSON list of paths. For each of them, one line of JSON is written to standard output: `answer`, the first NUM
pairs, or `error`. The script uses the standard library only.
"""

import json
import os
import sys
from collections.abc import Iterator


def answer_all(code: str, files: list[str], num: int) -> Iterator[dict]:
    """Yield the answer of the code for each file, or its error."""
    namespace: dict = {"__name__": "card"}
    exec(compile(code, "README.md", "exec"), namespace)
    for file in files:
        try:
            pairs = namespace["predict"](file)[:num]
            yield {"answer": [(str(label), float(probability)) for label, probability in pairs]}
        except Exception as error:  # of any type: the code is under test
            yield {"error": f"{type(error).__name__}: {error}"}


def main(code_file: str, num: str) -> None:
    """Run the code of a file; what it prints goes to standard error."""
    sys.path[0] = os.getcwd()  # instead of the folder of this script
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results, open(code_file, encoding="utf-8") as code:
        os.dup2(2, 1)
        for result in answer_all(code.read(), json.load(sys.stdin), int(num)):
            results.write(json.dumps(result) + "\n")
            results.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
