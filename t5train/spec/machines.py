"""The settings of machines and folders alone, for what is done for no run in particular."""

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ValidationError

from t5train.errors import SpecError
from t5train.spec.cluster import ClusterSpec
from t5train.spec.part import SpecPart
from t5train.spec.parts import StorageSpec
from t5train.spec.settings import change, explain, names_in


class MachinesSpec(SpecPart):
    """Where files lie, and how hosts are reached."""

    storage: StorageSpec = StorageSpec()
    cluster: ClusterSpec = ClusterSpec()

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The defaults with ``{"part.key": value}`` changed; SpecError says what is wrong with a setting."""
        values = cls().model_dump(mode="json")
        change(cls, values, settings)
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise SpecError(explain(error, names_in(cls))) from None
