"""Series cut into windows; a whole batch at once, also on a card."""

from __future__ import annotations

from typing import Any, Callable, Mapping, Sequence

import numpy as np
import torch
from torch.utils.data import Dataset

from exp.forecasting.data.splits import num_windows

# Most memory that a series may take on a device: a share of its free memory, or bytes if that is not known.
_DEVICE_FRACTION, _DEVICE_BYTES = 1 / 16, 2**28
# Irrational steps, whose fractions are spread evenly over samples and epochs (the R2 sequence).
_SAMPLE_STEP, _EPOCH_STEP = 0.7548776662466927, 0.5698402909980532


class WindowDataset(Dataset):
    """The windows of some rows of one or many series, stride 1; indexed by a whole batch.

    Holds views only: all splits of a series, and all data-loader workers, share its memory.

    Args:
        series: float32 each: ``x`` (T, C), the series, one below the other; ``marks`` (T, M), time features; optionally
            ``y`` (T, C), the truth if it is not ``x``, NaN where there is none; and ``future`` (T, K), values that are
            known over the horizon. Fastest if each column is contiguous (strides (1, T)): a window is then C contiguous
            pieces, and batches are contiguous as (B, C, L), the layout that the models use.
        rows: the rows that windows are cut from: a range, or the first row and the one after the last of each of S
            series, int64 (S, 2); fewer than ``lookback + horizon`` give no window.
        lookback: input rows of a window (L).
        horizon: forecast rows of a window (H).
        keep_on_device: whether a card keeps the rows and cuts the windows; None: if they are small compared with its
            free memory.
        per_series: whether an epoch draws as many windows from each series; they are spread evenly over the series, and
            others in each epoch. False: every window once.
        static: values of each series, float32 (S, K), and the number of the series of each row, int32 (T,).
    """

    is_batched = yields_tensors = True

    def __init__(
        self,
        series: Mapping[str, torch.Tensor],
        rows: range | np.ndarray,
        lookback: int,
        horizon: int,
        keep_on_device: bool | None = None,
        per_series: bool = False,
        static: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        ranges = np.array([[rows.start, rows.stop]]) if isinstance(rows, range) else rows
        # One tensor per storage, cut into windows on access: torch 1.10 cannot send two views of one storage to a new
        # process.
        part = slice(*ranges[0].tolist()) if len(ranges) == 1 else slice(None)
        self._tensors = {name: tensor[part] for name, tensor in series.items()}
        self.first_row = part.start or 0
        """The row of the series at which the tensors begin."""
        self.lookback, self.horizon, self.keep_on_device, self._static = lookback, horizon, keep_on_device, static
        counts = num_windows(ranges, lookback + horizon)
        self._counts = torch.from_numpy(counts[counts > 0])
        self._begins = torch.from_numpy(ranges[counts > 0, 0] - self.first_row)
        self._ends = self._counts.cumsum(0)
        self._count = int(counts.sum())
        self.needs_epoch = per_series
        self._draws = -(-self._count // max(len(self._counts), 1))
        """Windows of a series in an epoch, with ``per_series``."""

    def __len__(self) -> int:
        return self._draws * len(self._counts) if self.needs_epoch else self._count

    def sample_ids(self, keys: torch.Tensor) -> torch.Tensor:
        """The first rows of windows, int64 (B,); those of one series equal the numbers of its windows.

        Args:
            keys: window numbers, int64 (B,); with ``per_series`` sample and epoch, (B, 2).

        Raises:
            IndexError: a number is negative or not below ``len(self)``.
        """
        numbers = keys[:, 0] if keys.dim() == 2 else keys
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self):
            raise IndexError(f"windows are numbered from 0 to {len(self) - 1}")
        if not self.needs_epoch:
            series = torch.searchsorted(self._ends, numbers, right=True)
            return self._begins[series] + numbers - (self._ends - self._counts)[series]
        epochs = keys[:, 1].double() if keys.dim() == 2 else 0.0
        series = torch.div(numbers, self._draws, rounding_mode="floor")
        fraction = (numbers * _SAMPLE_STEP + epochs * _EPOCH_STEP) % 1.0
        position = (numbers - series * self._draws + fraction) / self._draws
        return self._begins[series] + (position * self._counts[series]).long()

    def __getitem__(self, indices: torch.Tensor | Sequence[int]) -> dict[str, torch.Tensor]:
        """Cut a batch.

        Args:
            indices: see :meth:`sample_ids`; or a list of numbers.

        Returns:
            ``{"x": (B, L, C), "marks": (B, L, M), "y": (B, H, C)}``, float32, transposed views of contiguous (B, C, L);
            and ``"index"``: the result of :meth:`sample_ids`, (B,). With ``y`` also ``"observed"`` (B, H, C): 1 where
            it has a value, else 0; with ``future`` also ``"future"`` (B, H, K), with ``static`` also ``"static"``
            (B, K).
        """
        index = self.sample_ids(torch.as_tensor(indices, dtype=torch.int64))
        # unfold: (rows, C) -> (windows, C, size), without copying.
        length = self.lookback + self.horizon
        windows = {name: tensor.unfold(0, length, 1) for name, tensor in self._tensors.items()}
        # index_select copies contiguous pieces; view[index] copies element by element, 3 to 30 times slower on torch
        # 2.13.
        return self._batch(index, self._static, lambda name, rows: windows[name][..., rows].index_select(0, index))

    def _batch(
        self,
        index: torch.Tensor,
        static: tuple[torch.Tensor, torch.Tensor] | None,
        cut: Callable[[str, slice], torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Assemble a batch; ``cut`` returns some rows of each window of a tensor, contiguous as (B, C, rows)."""
        lookback, horizon = slice(self.lookback), slice(self.lookback, None)
        batch = {name: cut(name, lookback).transpose(1, 2) for name in ("x", "marks")}
        batch["y"] = cut("y" if "y" in self._tensors else "x", horizon).transpose(1, 2)
        if "future" in self._tensors:
            batch["future"] = cut("future", horizon).transpose(1, 2)
        if "y" in self._tensors:
            batch["observed"] = (batch["y"] == batch["y"]).to(torch.float32)  # only NaN differs from itself
        if static is not None:
            values, series_of_row = static
            batch["static"] = values.index_select(0, series_of_row.index_select(0, index))
        return {**batch, "index": index}

    def device_builder(self, device: torch.device, free: int | None) -> Callable[[torch.Tensor], dict[str, Any]] | None:
        """Copy the rows to a device, and return a function that cuts batches there.

        Args:
            device: a card.
            free: free bytes of its memory; None: not known.

        Returns:
            A function of the result of :meth:`sample_ids` on the device; its batches equal those of
            :meth:`__getitem__`, strides included. None: batches are to be cut on the host.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())
        fits = size <= (_DEVICE_BYTES if free is None else free * _DEVICE_FRACTION)
        if not (fits if self.keep_on_device is None else self.keep_on_device):
            return None
        columns = {name: tensor.t().contiguous().to(device) for name, tensor in self._tensors.items()}
        static = None if self._static is None else (self._static[0].to(device), self._static[1].to(device))
        window = torch.arange(self.lookback + self.horizon, dtype=torch.int32).to(device)

        def cut(index: torch.Tensor) -> dict[str, Any]:
            # Not by strided views, as on the host: some devices copy the whole view (all windows) before they select.
            # The arithmetic is in int32, which every card supports.
            rows = (index.to(torch.int32).unsqueeze(1) + window).reshape(-1)
            windows = {
                name: series.index_select(1, rows).view(len(series), len(index), len(window)).transpose(0, 1)
                for name, series in columns.items()
            }
            return self._batch(index, static, lambda name, part: windows[name][..., part].contiguous())

        return cut
