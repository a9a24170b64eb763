"""What a rank and its guard exchange: the heartbeat, the error report, and SIGTERM.

Not here: what a rank computes (``t5train.train``). Standard library only, as guards import it.
"""
