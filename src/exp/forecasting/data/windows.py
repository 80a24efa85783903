"""All windows of a series, cut a batch at a time."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch.utils.data import Dataset

__all__ = ["WindowDataset"]

_SHARE, _WITHOUT_ASKING = 1 / 16, 2**28  # of a device's free memory for a series; bytes, where that is not known


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
        resident: whether a card keeps the rows and cuts the windows itself; None: where they are small beside its free
            memory.
        truth: what is to be forecast, as ``values``, but NaN where there is no truth; None: ``values``.
        future: what is known ahead, float32 (T, K); None: nothing.
    """

    takes_batches = gives_tensors = True

    def __init__(
        self,
        values: torch.Tensor,
        marks: torch.Tensor,
        rows: range,
        lookback: int,
        horizon: int,
        resident: bool | None = None,
        truth: torch.Tensor | None = None,
        future: torch.Tensor | None = None,
    ) -> None:
        # One tensor per memory, cut into views when asked: torch 1.10 cannot send two of one memory to a new process.
        self._values = values[rows.start : rows.stop]
        self._marks = marks[rows.start : rows.stop]
        self._ahead = {
            name: series[rows.start : rows.stop]
            for name, series in (("y", truth), ("future", future))
            if series is not None
        }
        self.rows = rows
        self.lookback = lookback
        self.horizon = horizon
        self.resident = resident

    def __len__(self) -> int:
        return max(len(self.rows) - self.lookback - self.horizon + 1, 0)

    def __getitem__(self, indices: torch.Tensor | Sequence[int]) -> dict[str, torch.Tensor]:
        """Cut a batch.

        Args:
            indices: window numbers, int64 (B,) or a list.

        Returns:
            ``{"x": (B, L, C), "marks": (B, L, M), "y": (B, H, C)}``, float32, transposed views of contiguous (B, C, L);
            and ``"index"``: the window numbers, int64 (B,). With ``truth``, ``"known"`` (B, H, C), too: 1 where ``y``
            has a truth, else 0; with ``future``, ``"future"`` (B, H, K).

        Raises:
            IndexError: a number is negative or not below ``len(self)``.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        size = self.lookback + self.horizon
        # unfold: (rows, C) -> (windows, C, size), without copying.
        windows, marks = (tensor.unfold(0, size, 1) for tensor in (self._values, self._marks))
        # index_select copies runs of memory; view[index] goes element by element, 3 to 30 times slower on torch 2.13.
        batch = {
            "x": windows[..., : self.lookback].index_select(0, index).transpose(1, 2),
            "marks": marks[..., : self.lookback].index_select(0, index).transpose(1, 2),
        }
        ahead = {"y": windows, **{name: series.unfold(0, size, 1) for name, series in self._ahead.items()}}
        for name, series in ahead.items():
            batch[name] = series[..., self.lookback :].index_select(0, index).transpose(1, 2)
        return {**self._with_known(batch), "index": index}

    def _with_known(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "y" in self._ahead:
            batch["known"] = (batch["y"] == batch["y"]).to(torch.float32)  # NaN alone is unlike itself
        return batch

    def numbers(self, keys: torch.Tensor) -> torch.Tensor:
        """The keys themselves."""
        return keys

    def on_device(self, device: torch.device, free: int | None) -> Callable[[torch.Tensor], dict[str, Any]] | None:
        """Batches cut on a device from rows that lie there: equal to those that are cut here, strides included.

        Args:
            device: a card.
            free: bytes of its memory; None: not known.

        Returns:
            Takes window numbers on the device, int64 (B,). None: cut them here.
        """
        held = (self._values, self._marks, *self._ahead.values())
        size = sum(tensor.numel() * tensor.element_size() for tensor in held)
        fits = size <= (_WITHOUT_ASKING if free is None else free * _SHARE)
        if not (fits if self.resident is None else self.resident):
            return None
        values, marks, *others = (tensor.t().contiguous().to(device) for tensor in held)
        window = torch.arange(self.lookback + self.horizon, dtype=torch.int32).to(device)

        def cut(index: torch.Tensor) -> dict[str, Any]:
            # Not by strided views, as on the host: some devices copy the whole view, all windows, before they select.
            # In 32 bits, which every card computes with.
            rows = (index.to(torch.int32).unsqueeze(1) + window).reshape(-1)
            seen, known, *more = (
                series.index_select(1, rows).view(len(series), len(index), len(window)).transpose(0, 1)
                for series in (values, marks, *others)
            )
            parts = {"x": seen[..., : self.lookback], "marks": known[..., : self.lookback]}
            for name, series in {"y": seen, **dict(zip(self._ahead, more))}.items():
                parts[name] = series[..., self.lookback :]
            batch = {name: part.contiguous().transpose(1, 2) for name, part in parts.items()}
            return {**self._with_known(batch), "index": index}

        return cut
