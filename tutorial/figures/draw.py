"""Draw the pictures of the course: `python tutorial/figures/draw.py [NAME...]` writes NAME.svg beside this file.

Needs matplotlib. Each function of the four modules, one for a part of the course, draws the picture of its name.
"""

import inspect
import sys

import fitting
import splitting
import talking
import training
from picture import Picture

PICTURES = {
    name: function
    for module in (talking, training, fitting, splitting)
    for name, function in inspect.getmembers(module, inspect.isfunction)
    if inspect.signature(function).return_annotation is Picture
}


def main(names):
    """Draw the pictures of these names, or all."""
    for name in names or PICTURES:
        PICTURES[name]().save(name)


if __name__ == "__main__":
    main(sys.argv[1:])
