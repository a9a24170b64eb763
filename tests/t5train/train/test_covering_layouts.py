"""The layouts that tests take by default have every pair of factors of all layouts."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.training.layouts import _covering, pairs_of

LAYOUTS = st.lists(
    st.tuples(
        st.sampled_from(["zero0", "zero1", "zero2", "zero3"]),
        st.sampled_from(["fp32", "bf16", "fp16"]),
        st.sampled_from(["", "-ep2", "-pp2", "-pp4"]),
        st.sampled_from(["", "-offload"]),
        st.sampled_from(["", "-tied", "-tied-deep"]),
    ).map(lambda parts: f"{parts[0]}-{''.join(parts[1:])}"),
    unique=True,
)


@given(layouts=LAYOUTS, data=st.data())
def test_every_pair_of_factors_is_in_a_chosen_layout(layouts: list[str], data: st.DataObject) -> None:
    always = data.draw(st.lists(st.sampled_from(layouts)) if layouts else st.just([]))
    chosen = _covering(layouts, always)
    assert chosen == [layout for layout in layouts if layout in chosen]
    assert set(always) <= set(chosen)
    assert set().union(*map(pairs_of, layouts)) == set().union(*map(pairs_of, chosen))
