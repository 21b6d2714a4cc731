"""The console commands. They import torch only when they need it.

- train.py, test.py: the commands of the trainer, which the rest of the package needs.
- Every other command is a file, or a folder with the file of its name, and can be deleted with its tests and its page:
  doctor/, export/, pack/, plan/, predict/, probe/, report/ (report and compare), reproduce/, split/, sweep/, table/,
  time/, track/.
- Shared by several of these: html/ (pages and charts), scan/ (the images of a data set), measure/ (speed of a run),
  output.py (paths of output files, tables and texts). They are deleted with the last command.
- main.py finds and starts commands; arguments.py: command lines with a config, errors and exit statuses;
  flag_hints.py: unknown flags; terminal.py: standard streams; completion.py: completion of command lines in a shell.

To add a command, add a file with `SUMMARY`, its line in the list, and a function of the name of the file,
(prog, args) -> exit status: `prog` is the name in the usage text, `args` are the arguments after the name of the
command. `run_guarded` of arguments.py handles errors, signals and exit statuses; `CommandParser` of flag_hints.py
suggests the nearest flag.
"""
