"""The head of a run over hosts: who they are, the way to them, and the supervision of their ranks."""
