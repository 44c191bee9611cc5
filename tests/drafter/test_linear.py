import pytest
import torch
from torch import nn

from eyas.drafter.linear import Linear, swap


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (2,), (3,), (4,), (1, 5), (2, 3), (64,), (65,), ()])
@pytest.mark.parametrize(("inner", "outer"), [(600, 700), (8, 4)])
def test_equals_the_plain_product_in_the_shape_of_its_input(shape, inner, outer, bias):
    torch.manual_seed(0)
    plain = nn.Linear(inner, outer, bias=bias)
    swapped = nn.Linear(inner, outer, bias=bias)
    swapped.load_state_dict(plain.state_dict())
    swap(nn.Sequential(swapped))
    x = torch.randn(*shape, inner)
    with torch.no_grad():
        found, wanted = swapped(x), plain(x)
    assert found.shape == wanted.shape and found.is_contiguous()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_gradients_and_other_types_take_the_librarys_way():
    made = Linear(600, 700, bias=False)
    x = torch.randn(3, 600)
    assert torch.equal(made(x), nn.functional.linear(x, made.weight))
    made(x).sum().backward()
    assert made.weight.grad is not None
    half = Linear(600, 700, bias=False).bfloat16()
    with torch.no_grad():
        assert torch.equal(half(x.bfloat16()), nn.functional.linear(x.bfloat16(), half.weight))


def test_only_plain_layers_are_swapped():
    class Own(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(4, 4), Own(4, 4))
    swap(model)
    assert [type(m) for m in model] == [Linear, Own]
