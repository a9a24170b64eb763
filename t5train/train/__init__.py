"""The program every rank runs."""
