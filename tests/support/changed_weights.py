"""Other weights in a folder of a model."""

from pathlib import Path

from safetensors.torch import load_file, save_file


def change_weights(folder: Path) -> Path:
    """Replace a file of weights by one of the same size with other values; returns its path."""
    file = next(folder.glob("*.safetensors"))
    changed = {name: 1.5 * tensor for name, tensor in load_file(file).items()}
    save_file(changed, file.with_name("new"), metadata={"format": "pt"})
    return file.with_name("new").replace(file)
