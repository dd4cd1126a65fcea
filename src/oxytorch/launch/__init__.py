"""`oxytorch run`: scripts as processes on cores of their own.

`topology` reads the machine, `plan` says which instance gets which cores, `environment` which
variables and libraries, `processes` starts them and ends all of them. `binding` runs inside a new
process before the user's command, `script` and `codeless` inside Python with --optimize.
"""
