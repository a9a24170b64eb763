"""A rank whose save takes longer than the grace period of a test."""

SAVING_SLOWLY = """
import signal, time
from types import SimpleNamespace
from t5train.rank.heartbeat import Heartbeat
def save(*_):
    heart.enter("save", 7)
    time.sleep(5)
    print("saved", flush=True)
    heart.enter("step", 8)
signal.signal(signal.SIGTERM, save)
deadlines = SimpleNamespace(start_seconds=60, compile_seconds=60, step_seconds=60, save_seconds=60)
with Heartbeat.of_rank(deadlines) as heart:
    print("ready", flush=True)
    while True:
        time.sleep(600)
"""
"""Writes heartbeats as ranks do. On SIGTERM it saves for five seconds, and then goes on as if it had not been told."""
