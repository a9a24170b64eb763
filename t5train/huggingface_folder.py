"""A folder with a model of Hugging Face's: its configuration, and where each of its tensors lies. None is read."""

import json
from pathlib import Path
from typing import Any, NamedTuple, Self

from t5train.confined import child
from t5train.errors import InputError
from t5train.tensor_files import StoredTensor, list_tensors

CONFIG, WEIGHTS = "config.json", "model.safetensors"
_INDEX = f"{WEIGHTS}.index.json"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.ckpt", "*.h5", "*.msgpack")


class HuggingFaceFolder(NamedTuple):
    """``tensors`` have the names of the files, in which a tied tensor may stand twice."""

    path: Path
    config: dict[str, Any]
    files: list[Path]
    tensors: dict[str, StoredTensor]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Of ``model.safetensors``, or of the shards that its index names.

        Raises InputError for a folder that is absent, damaged or incomplete, and for one whose weights are a pickle,
        which can run whatever code it likes.
        """
        if not path.is_dir():
            raise InputError(
                f"model.start_from is {path}: there is no such folder on this machine; name where it lies now"
            )
        files = _weight_files(path)
        return cls(path, _read_json(path / CONFIG), files, list_tensors(files))


def _weight_files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / _INDEX).is_file():
        raise InputError(_without_weights(folder))
    places = _read_json(folder / _INDEX).get("weight_map")
    names = set(places.values()) if isinstance(places, dict) else set()
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{folder / _INDEX} does not name the files of weights beside it: restore it")
    files = {name: child(folder, name, str(folder / _INDEX), InputError) for name in sorted(names)}
    if missing := [name for name, file in files.items() if not file.is_file()]:
        raise InputError(f"{folder} lacks {missing[0]}, which {_INDEX} names: copy it there too")
    return list(files.values())


def _without_weights(folder: Path) -> str:
    if others := sorted(path.name for pattern in _OTHER_WEIGHTS for path in folder.glob(pattern)):
        return (
            f"{folder} has its weights in {others[0]}, which may run code when it is read: load it where you trust it, "
            "with transformers' from_pretrained, and save it with save_pretrained, which writes safetensors"
        )
    return f"{folder} has neither {WEIGHTS} nor {_INDEX}: name the folder of a whole model"


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist: name the folder of a whole model") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}): restore it from where it came") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object: restore it from where it came")
    return found
