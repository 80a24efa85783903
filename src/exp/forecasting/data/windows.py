"""All windows of a series, cut a batch at a time."""

from __future__ import annotations

from typing import Sequence

import torch
from torch.utils.data import Dataset

__all__ = ["WindowDataset"]


class WindowDataset(Dataset):
    """The windows of some rows of a series, stride 1; indexed by a whole batch.

    Holds views only: all parts of a series, and all data-loader workers, share its memory.

    Args:
        values: the series, float32 (T, C). Best with each series contiguous (strides (1, T)): a window is then C runs
            of memory, and batches come out as the models use them, (B, C, L) contiguous.
        marks: time features, float32 (T, M), of the same layout.
        rows: which rows; there is no window in fewer than ``lookback + horizon``.
        lookback: rows that a forecast sees (L).
        horizon: rows that it forecasts (H).
    """

    takes_batches = True

    def __init__(self, values: torch.Tensor, marks: torch.Tensor, rows: range, lookback: int, horizon: int) -> None:
        # One tensor per memory, cut into views when asked: torch 1.10 cannot send two of one memory to a new process.
        self._values = values[rows.start : rows.stop]
        self._marks = marks[rows.start : rows.stop]
        self.rows = rows
        self.lookback = lookback
        self.horizon = horizon

    def __len__(self) -> int:
        return max(len(self.rows) - self.lookback - self.horizon + 1, 0)

    def __getitem__(self, indices: torch.Tensor | Sequence[int]) -> dict[str, torch.Tensor]:
        """Cut a batch.

        Args:
            indices: window numbers, int64 (B,) or a list.

        Returns:
            ``{"x": (B, L, C), "marks": (B, L, M), "y": (B, H, C)}``, float32, transposed views of contiguous (B, C, L);
            and ``"index"``: the window numbers, int64 (B,).

        Raises:
            IndexError: a number is negative or not below ``len(self)``.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        size = self.lookback + self.horizon
        # unfold: (rows, C) -> (windows, C, size), without copying.
        windows, marks = (tensor.unfold(0, size, 1) for tensor in (self._values, self._marks))
        # index_select copies runs of memory; view[index] goes element by element, 3 to 30 times slower on torch 2.13.
        return {
            "x": windows[..., : self.lookback].index_select(0, index).transpose(1, 2),
            "marks": marks[..., : self.lookback].index_select(0, index).transpose(1, 2),
            "y": windows[..., self.lookback :].index_select(0, index).transpose(1, 2),
            "index": index,
        }
