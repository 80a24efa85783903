from __future__ import annotations

import pytest
import torch

from exp.compat import has_fused_attention
from exp.forecasting.timebridge.attention import attention, detrending_matrix, dropout


def test_attention_is_a_softmax_average_of_the_values():
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    weights = torch.softmax(torch.einsum("bhqe,bhke->bhqk", query, key) / 2.0, -1)
    torch.testing.assert_close(attention(query, key, value), torch.einsum("bhqk,bhke->bhqe", weights, value))
    if has_fused_attention():  # which other devices take
        on_meta = (tensor.to("meta") for tensor in (query, key, value))
        assert attention(*on_meta, dropout_p=0.1).shape == (2, 3, 5, 4)


@pytest.mark.parametrize("p", [0.15, 0.5, 0.999])
@pytest.mark.parametrize("size", [400_000, 400_003])
def test_dropout_drops_the_share_and_keeps_the_mean(p, size):
    torch.manual_seed(0)
    x = torch.ones(size, requires_grad=True)
    kept = dropout(x, p)
    share = (kept == 0).float().mean().item()
    assert share == pytest.approx(p, abs=4 * (p * (1 - p) / size) ** 0.5 + 2**-16)
    torch.testing.assert_close(kept[kept != 0], torch.full_like(kept[kept != 0], 1 / (1 - p)), rtol=0.01, atol=0)
    kept.sum().backward()
    assert torch.equal(x.grad, kept.detach())


def test_dropout_is_independent_within_a_draw_and_follows_the_seed():
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(dropout(torch.ones(100_000, 4), 0.5))
    assert torch.equal(*drawn)
    assert (torch.corrcoef(drawn[0].t()) - torch.eye(4)).abs().max() < 0.02


def test_the_matrix_subtracts_the_trailing_mean_along_the_embedding():
    x = torch.tensor([[1.0, 2.0, 6.0, 3.0, 9.0]])
    # Means of 3: (1+2+6)/3 = 3 for the first three elements, then (2+6+3)/3 and (6+3+9)/3.
    expected = torch.tensor([[1.0 - 3, 2 - 3, 6 - 3, 3 - 11 / 3, 9 - 6]])
    torch.testing.assert_close(x @ detrending_matrix(5, 3), expected)
    assert torch.equal(detrending_matrix(4, 1), torch.zeros(4, 4))
