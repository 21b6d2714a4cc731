"""Use of trained models outside a run; nothing in the core imports this package.

- load_run.py: `load_run`, from a run, a checkpoint, an exported folder or a timm name to a `LoadedRun` (loaded_run.py).
- locate_run.py: the files that the argument RUN of commands and of the Python API names.
- image_arguments.py, forward_chunks.py: the image files of a command, and their division into forward passes.
"""
