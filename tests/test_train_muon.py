"""Muon's update against its definition by singular values, and whom it leaves to AdamW."""

import pytest
import torch
from torch import nn

from train.core.muon import ADAM_SIZE, MOMENTUM, SHAPE, Muon, matrix_groups, orthogonal


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (1, 8)])
def test_orthogonal(shape: tuple[int, int]) -> None:
    """Catches a tall matrix taken for a wide one, and singular values that stay as they are."""
    torch.manual_seed(0)
    u, _, v = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    values = torch.logspace(0, -1.5, min(shape))
    found = orthogonal(1e-4 * u @ torch.diag(values) @ v)
    turned = u.T @ found @ v.T
    assert found.dtype == torch.float32 and found.shape == shape
    assert ((turned.diagonal() > 0.6) & (turned.diagonal() < 1.25)).all()
    assert (turned - torch.diag(turned.diagonal())).abs().max() < 0.05
    assert not orthogonal(torch.zeros(shape)).any()  # and no NaN


def test_an_update() -> None:
    """Catches momentum that starts elsewhere, decay of other weights, a size that hangs on the gradient's, and a group
    of no matrix that AdamW does not get."""
    torch.manual_seed(0)
    matrix, norm, head = (
        nn.Parameter(torch.randn(12, 30)),
        nn.Parameter(torch.ones(30)),
        nn.Parameter(torch.randn(9, 30)),
    )
    groups = matrix_groups({"params": [matrix, norm, head], "part": "x"}, [head])
    assert [group.get(SHAPE) for group in groups] == [(12, 30), None] and groups[1]["params"] == [norm, head]
    assert all(group["part"] == "x" for group in groups)
    others = [nn.Parameter(one.detach().clone()) for one in (norm, head)]
    muon = Muon(groups, lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    adam = torch.optim.AdamW(others, lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    momentum, expected = torch.zeros(12, 30), matrix.detach().clone()
    # torch's own, which takes whole matrices only and keeps no state that ZeRO could split
    other = nn.Parameter(matrix.detach().clone())
    torchs = torch.optim.Muon([other], lr=0.1, weight_decay=0.5, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for one, same in zip((norm, head), others, strict=True):
            one.grad = torch.randn_like(one)
            same.grad = one.grad.clone()
        matrix.grad = gradient = 10.0**step * torch.randn(12, 30)
        other.grad = gradient.clone()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        way = orthogonal(MOMENTUM * momentum + (1 - MOMENTUM) * gradient)
        expected = expected * (1 - 0.1 * 0.5) - 0.1 * ADAM_SIZE * 30**0.5 * way
        muon.step()
        adam.step()
        torchs.step()
        torch.testing.assert_close(matrix.detach(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(matrix, other, rtol=0, atol=0.1 * ADAM_SIZE * 30**0.5 * 0.02)  # it computes in bf16
    for one, same in zip((norm, head), others, strict=True):
        assert torch.equal(one, same)
    assert muon.state[matrix].keys() == {"step", "exp_avg"}
