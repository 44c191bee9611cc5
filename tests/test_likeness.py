"""How like two computations of the same states are: equal, rounded, shifted, of another layer, too short to tell."""

import pytest
import torch

from eyas.stores import likeness
from eyas.stores.states import RowStates

LAYERS = [2, 5]


def row(seed, length=20, shift=0, noise=0.0):
    g = torch.Generator().manual_seed(seed)
    aux, last = torch.randn(length, 2, 16, generator=g), torch.randn(length, 16, generator=g)
    aux, last = (x.roll(shift, 0) + noise * torch.randn(x.shape, generator=g) for x in (aux, last))
    ids = torch.zeros(length, dtype=torch.int32)
    return RowStates("r", ids, aux, last, ids, 3)


def compared(found, reference, positions=range(20)):
    return likeness.compare([(found, reference, positions)], LAYERS)


def test_equal_states_have_no_error():
    found = compared(row(1), row(1))
    assert found["positions"] == 17 and likeness.differs(found) is None
    assert set(found["relative_error"].values()) == {0.0} and found["shifts"]["0"] == pytest.approx(1)
    assert "cosine at least 1.0000" in likeness.shown(found)


def test_rounding_is_no_difference_and_noise_is():
    assert likeness.differs(compared(row(1, noise=0.01), row(1))) is None
    assert "has a mean cosine of" in likeness.differs(compared(row(1, noise=0.5), row(1)))


@pytest.mark.parametrize("shift, said", [(1, "one position earlier"), (-1, "one position later")])
def test_a_moved_slot_is_named(shift, said):
    assert said in likeness.differs(compared(row(1, shift=shift), row(1)))


def test_one_layer_for_another_is_named():
    a = row(1)
    swapped = RowStates("r", a.ids_T, a.aux_TLD.flip(1), a.last_SD, a.top1_T, 3)
    assert likeness.differs(compared(swapped, a)).startswith("layer ")


def test_rows_too_short_to_tell_say_nothing():
    assert compared(row(1, length=3), row(1, length=3)) is None
    assert compared(row(1), row(1), range(18, 20)) is None
