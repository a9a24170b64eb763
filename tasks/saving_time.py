"""What checkpoints cost a run, for people."""

from collections.abc import Iterable

from t5train.train.metrics import Values


def saving_line(metrics: Iterable[Values]) -> str:
    """For how long training stood still to save, of the time that steps and saving took; lost attempts aside."""
    saved, trained = [], 0.0
    for line in metrics:
        trained += line.get("seconds") or 0.0
        if (seconds := line.get("save_seconds")) is not None:
            saved.append(seconds)
    stood = sum(saved)
    share = stood / (stood + trained) if saved else 0.0
    return f"{len(saved)} checkpoints, for which training stood still {stood:.1f} s: {share:.2%} of its time"
