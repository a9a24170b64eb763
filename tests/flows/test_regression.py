"""The flow of the nightly regression in Prefect."""

from flows.regression import regression


def test_every_parameter_is_described_in_the_form_of_prefect() -> None:
    properties = regression.parameters.properties
    assert properties.keys() == {"root", "cases", "hostfile", "keep_nights"}
    assert all(each.get("description") for each in properties.values())
