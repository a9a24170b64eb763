"""Learning rate by step."""

import math

from t5train.spec import OptimizerSpec


def learning_rate(optimizer: OptimizerSpec, step: int) -> float:
    """Return the rate of optimizer step ``step`` (the first is 1): linear warm-up, then the schedule of the spec."""
    peak, warmup = optimizer.peak_learning_rate, optimizer.warmup_steps
    if step <= warmup:
        return peak * step / warmup
    match optimizer.schedule:
        case "constant":
            return peak
        case "inverse-sqrt":
            return peak * math.sqrt(max(warmup, 1) / step)
        case "cosine":
            done = (step - warmup) / (optimizer.num_steps - warmup)
            final = optimizer.final_learning_rate
            return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
        case "linear":
            left = (optimizer.num_steps - min(step, optimizer.num_steps)) / (optimizer.num_steps - warmup)
            return optimizer.final_learning_rate + (peak - optimizer.final_learning_rate) * left
