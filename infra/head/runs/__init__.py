"""What the folders of runs say about them, for people: their state, the story of one run, and its removal.

Reading never locks or changes a run. Not here: what a run does (``infra.head.training_run``), and what no run needs
(``infra.head.storage.garbage_collection``).
"""
