"""The benchmark runner: ops and whole models, next to their peers and the machine's limits.

`oxytorch bench --help` explains its use. Nothing here is imported by `import oxytorch`, nor by
anything that is measured.
"""
