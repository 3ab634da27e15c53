"""Promise 7: a small transformer made of our layers learns a real task."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

import lotformer


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = lotformer.LOTAttention(dim, num_heads=2, rank=8, prefix_tokens=1, local_conv="2d")
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class DigitsTransformer(nn.Module):
    """Two LOT blocks on the 16 patches of 2×2 pixels of an 8×8 digit, read out at a class token."""

    def __init__(self, dim: int = 32):
        super().__init__()
        self.patch = nn.Linear(4, dim)
        self.position = nn.Parameter(0.02 * torch.randn(17, dim))
        self.blocks = nn.Sequential(Block(dim), Block(dim))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 10))

    def forward(self, images):
        patches = images.unfold(1, 2, 2).unfold(2, 2, 2).reshape(-1, 16, 4)
        x = nn.functional.pad(self.patch(patches), (0, 0, 1, 0)) + self.position
        return self.head(self.blocks(x)[:, 0])


def test_two_lot_layers_read_digits():
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32) / 16
    train_x, test_x, train_y, test_y = train_test_split(
        images, torch.tensor(digits.target), test_size=0.25, random_state=0, stratify=digits.target
    )
    model = DigitsTransformer()
    epochs, batch = 20, 64
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=1e-2)
    steps = epochs * -(-len(train_x) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=steps)
    for _ in range(epochs):
        for index in torch.randperm(len(train_x)).split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(train_x[index]), train_y[index]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    accuracy = (model(test_x).argmax(-1) == test_y).float().mean().item()
    assert accuracy > 0.95, f"test accuracy {accuracy:.3f}"
