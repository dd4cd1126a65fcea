"""`oxytorch tune`: which placement of `oxytorch run` is the best one for a script.

`placements` lists what is tried, `figures` reads what a script prints, `search` says what runs next
and which placement wins. `trial` runs one as `oxytorch run` would, `results_file` keeps what came
of it; `session` joins them. `report` and `drawing` tell a person. `measure` is the script for a
saved program.
"""
