"""Environment variables by which a guard tells its rank where things lie."""

RANK_FILES = "T5_RANK_FILES"
"""The files of the rank itself, up to their suffix: ``.../rank-00003``."""

LOCKS = "T5_LOCKS"
"""This machine's folder of locks on accelerators."""
