"""A folder with the random weights that training would begin with, as transformers and this project read it."""

import shutil
from functools import partial
from pathlib import Path

from t5train.data.vocabulary.tokenizer import SPIECE, TOKENIZER_JSON, Tokenizer
from t5train.files.atomic import write_json
from t5train.model.model_shape import huggingface_config, resolve
from t5train.model.parameters import parameter_shapes
from t5train.records.identity import fingerprint
from t5train.records.stage_records import TokenizerFiles
from t5train.spec import RunSpec


def random_model(spec: RunSpec, tokenizer: TokenizerFiles, root: Path) -> Path:
    """Return the folder of the model of a spec, below a root, where an earlier call may have made it."""
    from safetensors.torch import save_file
    from torch import Size

    from t5train.model.initialization import filled, initialise

    vocabulary = Tokenizer.load(tokenizer.path)
    shape = resolve(spec.model, vocabulary.vocab_size)
    config = huggingface_config(shape, vocabulary.pad_id, vocabulary.eos_id)
    identity = fingerprint({"config": config, "seed": spec.optimizer.seed, "tokenizer": tokenizer.fingerprint})
    folder = root / f"start-{identity[:12]}"
    if not folder.exists():
        unfinished = folder.with_name(f".{folder.name}")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        sizes = {name: Size(size) for name, size in parameter_shapes(shape).items()}
        values = filled(sizes, partial(initialise, shape=shape, seed=spec.optimizer.seed))
        tensors = dict(zip(sizes, values, strict=True))
        save_file(tensors, unfinished / "model.safetensors", metadata={"format": "pt"})
        write_json(unfinished / "config.json", config)
        for name in (SPIECE, TOKENIZER_JSON):
            shutil.copyfile(tokenizer.path / name, unfinished / name)
        unfinished.rename(folder)
    return folder
