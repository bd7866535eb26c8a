"""The history of runs in one SQLite file: appended by each run, read for its trend.

schema.py     what the file holds, by version, and what is refused
database.py   append and read
commit.py     which commit was run
"""
