"""Figures of the tutorial: `python tutorial/figures/draw.py [NAME...]` writes NAME.svg beside this file.

Needs matplotlib. There is one module per part of the tutorial; each of its functions draws the figure of its name.
"""

import inspect
import sys

import communication
import data_parallelism
import memory_saving
import model_parallelism
from picture import Picture

PICTURES = {
    name: function
    for module in (communication, data_parallelism, memory_saving, model_parallelism)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if inspect.signature(function).return_annotation is Picture
}


def main(names):
    """Draw the figures with these names, or all."""
    for name in names or PICTURES:
        PICTURES[name]().save(name)


if __name__ == "__main__":
    main(sys.argv[1:])
