"""Faults that people really shipped, injected into real decodes: the suite must not pass, and must name the kind.

python -m tests.faults            every variant and the healthy matrix; exit status 1 if a target is missed
python -m tests.faults --quick    one variant a kind and a small healthy matrix
"""
