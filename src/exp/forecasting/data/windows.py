"""Which rows of a series are for training, validation and testing, and the windows of these, cut a batch at a time."""

from __future__ import annotations

from typing import Any, Callable, Sequence

import torch
from torch.utils.data import Dataset

from exp.errors import DataError

__all__ = ["TooFewRowsError", "WindowDataset", "borders"]

_PER_MONTH = {"ett_hour": 30 * 24, "ett_minute": 30 * 24 * 4}

# Most memory that a series may take on a device: a share of its free memory, or bytes if that is not known.
_SHARE, _WITHOUT_ASKING = 1 / 16, 2**28


class TooFewRowsError(DataError):
    """A series is too short for its split."""


def borders(split: str, num_rows: int, lookback: int, horizon: int) -> dict[str, range]:
    """The rows of each split, as in the published benchmarks (Informer, arXiv 2012.07436, and later papers).

    - ``ett_hour`` and ``ett_minute``: 12, 4 and 4 months of 30 days, hourly or every 15 minutes; later rows are unused.
    - ``ratio``: the first ``int(0.7 n)`` rows for training, the last ``int(0.2 n)`` for testing, the rest between them
      for validation.
    - ``pems``: the first 60 %, the next 20 % and the rest (the loaders of PEMS in SCINet, arXiv 2106.09305, and
      iTransformer, arXiv 2310.06625).
    - ``new``: all rows are for testing. They may be too few for a window, but not for a forecast of the rows after
      them.

    Validation and test begin ``lookback`` rows early, so that their first window forecasts the first row of the split;
    not with ``pems``, whose splits have no common rows.

    Args:
        split: ``data.split``.
        num_rows: rows of the series (n).
        lookback: input rows of a window.
        horizon: forecast rows of a window.

    Returns:
        ``{"train": range(first, last + 1), "val": ..., "test": ...}``, each with at least one window; only ``test``
        with ``new``.

    Raises:
        TooFewRowsError: a split has too few rows; the message has the rows of each split and the rows needed.
    """
    if split == "new":
        if num_rows < lookback:
            raise TooFewRowsError(f"{num_rows} rows are too few: a forecast sees data.lookback={lookback} of them")
        return {"test": range(num_rows)}
    early = lookback  # rows that validation and test share with the split before
    if split == "pems":
        train, known, end, early = int(0.6 * num_rows), int((0.6 + 0.2) * num_rows), num_rows, 0  # not 0.8: as there
    elif split == "ratio":
        train, known, end = int(num_rows * 0.7), num_rows - int(num_rows * 0.2), num_rows
    else:
        train, known, end = (months * _PER_MONTH[split] for months in (12, 16, 20))
    parts = {"train": range(train), "val": range(train - early, known), "test": range(known - early, end)}
    if end > num_rows or train < early or min(map(len, parts.values())) < lookback + horizon:
        sizes = f"{train} for training, {known - train} for validation and {end - known} for testing"
        raise TooFewRowsError(
            f"{num_rows} rows are too few for data.split={split}, which takes {sizes}, with data.lookback={lookback} "
            f"and data.horizon={horizon}: training needs lookback + horizon rows, the others "
            f"{'horizon' if early else 'as many'}; take data.split=ratio, a smaller window, or the whole file"
        )
    return parts


class WindowDataset(Dataset):
    """The windows of some rows of a series, stride 1; indexed by a whole batch.

    Holds views only: all splits of a series, and all data-loader workers, share its memory.

    Args:
        values: the series, float32 (T, C). Fastest if each series is contiguous (strides (1, T)): a window is then C
            contiguous pieces, and batches are contiguous as (B, C, L), the layout that the models use.
        marks: time features, float32 (T, M), of the same layout.
        rows: the rows that windows are cut from; fewer than ``lookback + horizon`` give no window.
        lookback: input rows of a window (L).
        horizon: forecast rows of a window (H).
        resident: whether a card keeps the rows and cuts the windows; None: if they are small compared with its free
            memory.
        truth: the truth, float32 (T, C), NaN where there is none; None: ``values``.
        future: values that are known over the horizon, float32 (T, K); None: there are none.
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
        # One tensor per storage, cut into windows on access: torch 1.10 cannot send two views of one storage to a new
        # process.
        series = {"x": values, "marks": marks, "y": truth, "future": future}
        self._series = {name: each[rows.start : rows.stop] for name, each in series.items() if each is not None}
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
            and ``"index"``: the window numbers, int64 (B,). With ``truth`` also ``"known"`` (B, H, C): 1 where ``y``
            has a truth, else 0; with ``future`` also ``"future"`` (B, H, K).

        Raises:
            IndexError: a number is negative or not below ``len(self)``.
        """
        index = torch.as_tensor(indices, dtype=torch.int64)
        # unfold: (rows, C) -> (windows, C, size), without copying.
        windows = {name: each.unfold(0, self.lookback + self.horizon, 1) for name, each in self._series.items()}
        # index_select copies contiguous pieces; view[index] copies element by element, 3 to 30 times slower on torch
        # 2.13.
        return self._batch(index, lambda name, rows: windows[name][..., rows].index_select(0, index))

    def _batch(self, index: torch.Tensor, cut: Callable[[str, slice], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Assemble a batch; ``cut`` returns some rows of each window of a tensor, contiguous as (B, C, rows)."""
        seen, ahead = slice(self.lookback), slice(self.lookback, None)
        batch = {name: cut(name, seen).transpose(1, 2) for name in ("x", "marks")}
        batch["y"] = cut("y" if "y" in self._series else "x", ahead).transpose(1, 2)
        if "future" in self._series:
            batch["future"] = cut("future", ahead).transpose(1, 2)
        if "y" in self._series:
            batch["known"] = (batch["y"] == batch["y"]).to(torch.float32)  # only NaN differs from itself
        return {**batch, "index": index}

    def numbers(self, keys: torch.Tensor) -> torch.Tensor:
        """The keys of the sampler, which are window numbers already."""
        return keys

    def on_device(self, device: torch.device, free: int | None) -> Callable[[torch.Tensor], dict[str, Any]] | None:
        """Copy the rows to a device, and return a function that cuts batches there.

        Args:
            device: a card.
            free: free bytes of its memory; None: not known.

        Returns:
            A function of window numbers on the device, int64 (B,); its batches equal those of :meth:`__getitem__`,
            strides included. None: batches are to be cut on the host.
        """
        size = sum(tensor.numel() * tensor.element_size() for tensor in self._series.values())
        fits = size <= (_WITHOUT_ASKING if free is None else free * _SHARE)
        if not (fits if self.resident is None else self.resident):
            return None
        there = {name: tensor.t().contiguous().to(device) for name, tensor in self._series.items()}
        window = torch.arange(self.lookback + self.horizon, dtype=torch.int32).to(device)

        def cut(index: torch.Tensor) -> dict[str, Any]:
            # Not by strided views, as on the host: some devices copy the whole view (all windows) before they select.
            # The arithmetic is in int32, which every card supports.
            rows = (index.to(torch.int32).unsqueeze(1) + window).reshape(-1)
            windows = {
                name: series.index_select(1, rows).view(len(series), len(index), len(window)).transpose(0, 1)
                for name, series in there.items()
            }
            return self._batch(index, lambda name, part: windows[name][..., part].contiguous())

        return cut
