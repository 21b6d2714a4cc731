"""Data sets by name, one family per file.

To add a data set, add one file with a subclass of `ImageDataset` (base.py) that `@DATASETS.register("name")`
decorates; DATA.NAME names it. It defines `from_cfg`, sets `classes` and `labels`, and defines `read` or, for image
files, `describe`. The checks before a start read these files: import torch and torchvision inside functions only.
"""
