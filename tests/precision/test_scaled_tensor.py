from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from nbaccel.precision.fp8.formats import BF16, E4M3, E5M2, FP16
from nbaccel.precision.fp8.scaled_tensor import ScaledTensor


def stored(number_format=FP16, shape=(8, 16), seed=0) -> ScaledTensor:
    generator = torch.Generator().manual_seed(seed)
    return ScaledTensor.of(torch.randn(shape, generator=generator), number_format)


@pytest.mark.parametrize("number_format", [E4M3, E5M2, FP16, BF16], ids=lambda f: f.name)
def test_to_torch_it_is_float32_and_in_memory_it_is_short(number_format):
    tensor = stored(number_format, (64, 64))
    assert tensor.dtype is torch.float32
    assert tensor.shape == (64, 64)
    assert tensor.stored_bytes == 64 * 64 * number_format.dtype.itemsize + 4
    assert number_format.name in repr(tensor)


def test_reading_gives_plain_values():
    tensor = stored()
    total = tensor + 1
    assert type(total) is torch.Tensor
    assert torch.equal(total, tensor.dequantize() + 1)
    assert torch.equal(tensor.to(torch.float64).float(), tensor.dequantize())


def test_a_product_with_one_number_is_exact():
    tensor = stored(E4M3)
    before, payload = tensor.dequantize(), tensor.payload.clone()
    tensor.mul_(0.3)
    tensor.mul_(torch.tensor(2.0))
    tensor.div_(4)
    assert torch.equal(tensor.payload.view(torch.uint8), payload.view(torch.uint8))
    assert torch.allclose(tensor.dequantize(), before * 0.15, rtol=1e-6)


def test_an_operation_in_place_stores_under_a_new_scale():
    tensor = stored(E4M3)
    returned = tensor.add_(1000.0)
    assert returned is tensor
    assert (tensor.dequantize() - 1000).abs().max() < 40
    tensor.mul_(torch.full((8, 16), 2.0))
    assert (tensor.dequantize() - 2000).abs().max() < 80


def test_operations_on_many_tensors_write_to_each():
    tensors = [stored(seed=1), stored(seed=2)]
    expected = [tensor.dequantize() * 3 for tensor in tensors]
    torch._foreach_mul_(tensors, 3.0)
    for tensor, values in zip(tensors, expected, strict=True):
        assert torch.allclose(tensor.dequantize(), values, rtol=2e-3)


def test_detached_tensors_share_and_clones_do_not():
    tensor = stored()
    tensor.detach().zero_()
    assert tensor.dequantize().eq(0).all()
    other = stored()
    clone = other.clone()
    clone.zero_()
    assert not other.dequantize().eq(0).all()


def test_it_is_copied_saved_and_sent_as_it_is(tmp_path):
    weight = nn.Parameter(stored())
    twin = copy.deepcopy(weight)
    assert isinstance(twin, ScaledTensor)
    assert twin.requires_grad
    buffer = io.BytesIO()
    torch.save(weight.detach(), buffer)
    buffer.seek(0)
    read = torch.load(buffer, weights_only=False)
    sent = pickle.loads(pickle.dumps(weight.detach()))
    for item in (twin, read, sent):
        assert torch.equal(item.detach().dequantize(), weight.detach().dequantize())


def test_it_trains_clips_and_steps_like_a_parameter():
    weight = nn.Parameter(stored())
    weight.grad = stored(E4M3, seed=3)
    before = weight.detach().dequantize()
    norm = nn.utils.clip_grad_norm_([weight], 1.0)
    assert norm > 1
    assert nn.utils.get_total_norm([weight.grad]) == pytest.approx(1, rel=1e-4)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.step()
    expected = before - 0.1 * weight.grad.dequantize()
    assert torch.allclose(weight.detach().dequantize(), expected, atol=2e-3)
    optimizer.zero_grad(set_to_none=False)
    assert weight.grad.dequantize().eq(0).all()


def test_plain_tensors_take_its_values_and_it_takes_theirs():
    tensor, plain = stored(), torch.zeros(8, 16)
    plain.copy_(tensor)
    assert torch.equal(plain, tensor.dequantize())
    tensor.copy_(torch.full((8, 16), 3.0))
    assert tensor.dequantize().eq(3).all()
    with pytest.raises(RuntimeError):
        tensor.add_(torch.zeros(3, 5))
