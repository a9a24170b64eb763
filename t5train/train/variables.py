"""Environment variables by which the guard of a rank tells it where things lie; standard library only, for the guard."""

RANK_FILES = "T5_RANK_FILES"
"""The files of the rank itself, up to their suffix: ``.../rank-00003``."""

LOCKS = "T5_LOCKS"
"""This machine's folder of locks on accelerators."""
