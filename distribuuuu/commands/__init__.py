"""The console commands: train and test, and one package per further command, each of which can be deleted.

main.py has the table of commands; `run_guarded` of guard.py is around every one of them; flag_hints.py reads flags and
options; html/, scan/ and output.py are shared by several commands. A new command is an entry of the table, and a
function of its name, (prog, args) -> exit status.
"""
