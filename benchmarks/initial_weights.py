"""Measure how long a model's initial weights take, which every rank draws before training.

    python -m benchmarks.initial_weights [--preset base] [--rounds 3]

Each weight depends on the seed and its name only, and is drawn on the CPU by several threads.
"""

import argparse
import os
import statistics
import time
from functools import partial

os.environ |= {"DS_ACCELERATOR": "cpu"}

from benchmarks.measured_result import add_into, measured_here
from t5train.engine.parameter_layout import huggingface_names
from t5train.model.initialization import NoDefaultValues, fill_all, initialise
from t5train.model.model_shape import resolve
from t5train.model.t5 import T5
from t5train.spec import ModelSpec


def main() -> None:
    """Build the model and draw its weights a few times, and print the median."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="base")
    parser.add_argument("--rounds", type=int, default=3)
    add_into(parser)
    given = parser.parse_args()
    shape = resolve(ModelSpec.model_validate({"preset": given.preset}), 32_128)
    seconds, cpu_seconds, parameters = [], [], 0
    for _ in range(given.rounds):
        started, computed = time.perf_counter(), time.process_time()
        with NoDefaultValues():
            model = T5(shape, decoder_start_id=0)
        names = huggingface_names(model, expert_rank=0)
        named = {names[name]: parameter for name, parameter in model.named_parameters()}
        fill_all(named, partial(initialise, shape=shape, seed=0))
        seconds.append(time.perf_counter() - started)
        cpu_seconds.append(time.process_time() - computed)
        parameters = sum(parameter.numel() for parameter in named.values())
    row = {
        "weights": parameters,
        "CPU seconds": round(statistics.median(cpu_seconds), 1),
        "wall-clock seconds": round(statistics.median(seconds), 1),
    }
    notes = f"Median of {given.rounds} rounds."
    measured_here(f"Initial weights of {given.preset}", [row], notes).show(given.into)


if __name__ == "__main__":
    main()
