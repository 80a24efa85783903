"""A network with the kinds of layers that experiments have, and a training of it; on cards and on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    """Classes of the pixels of an image, given a word."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.position = nn.Parameter(torch.zeros(1, 16, width))
        self.words, self.norm = nn.Embedding(10, width), nn.LayerNorm(width)
        self.heads = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up = nn.ConvTranspose2d(width, 8, 2, 2, 2, 2, dilation=3)
        self.mix = nn.Sequential(
            nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.GELU(), nn.MaxPool2d(2)
        )
        self.classes = nn.Conv2d(8, 5, 1)

    def forward(self, image: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
        x = self.patches(image)
        tokens = self.norm(x.flatten(2).transpose(1, 2) + self.position + self.words(word)[:, None])
        tokens = tokens + self.heads(tokens, tokens, tokens)[0]
        parts = tokens.unflatten(-1, (2, -1)).transpose(1, 2)
        tokens = tokens + F.scaled_dot_product_attention(parts, parts, parts).transpose(1, 2).flatten(2)
        x = self.mix(self.up(tokens.transpose(1, 2).reshape_as(x)))
        # Contiguous, because torch's group norm keeps the channels-last format on the CPU only.
        scores = self.classes(F.group_norm(x.contiguous(), 2))
        return F.interpolate(scores, image.shape[-2:], mode="bilinear")


def train(device: Any) -> list[float]:
    """The losses of four steps."""
    torch.manual_seed(0)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        image, word, truth = torch.randn(4, 3, 16, 16), torch.randint(10, (4,)), torch.randint(5, (4, 16, 16))
        scores, truth = model(image.to(device), word.to(device)), truth.to(device)
        loss = F.cross_entropy(scores, truth, ignore_index=0) + F.softplus(scores).mean()
        loss = loss + F.cross_entropy(scores.mean((2, 3)), truth[:, 0, 0], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
