"""Map-style datasets, indexed by a whole batch as the samplers do."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.utils.data import Dataset
from torch.utils.data.dataloader import default_collate

from exp.data.seeding import preserved_generators, seed_sample
from exp.errors import DataError, SampleError
from exp.user_code import EXPERIMENT_PAGE, is_of_user, message_of, place_of, shown

__all__ = ["batched"]


def batched(dataset: Any, collate: Callable[[list[Any]], Any] | None, seed: int, name: str = "") -> Any:
    """A dataset that is indexed by a whole batch: itself, if it is; else samples, collated.

    Args:
        dataset: of :class:`exp.data.base.Data`.
        collate: makes a batch of a list of samples; None: torch's ``default_collate``.
        seed: of what samples draw at random.
        name: of the split, for errors, such as ``mine.Photos.val``; empty: the dataset's class.
    """
    if getattr(dataset, "takes_batches", False):
        return dataset
    return _Batched(dataset, collate or default_collate, seed, name or shown(dataset))


class _Batched(Dataset[Any]):
    """Random numbers that a sample draws, of Python's, NumPy's and torch's global generators, depend on seed, epoch and
    sample alone: runs are the same for any number of ranks and loader processes, and after resuming.
    """

    takes_batches = True
    needs_epoch = True

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], seed: int, name: str) -> None:
        self.dataset = dataset
        self.collate = collate
        self.seed = seed
        self.name = name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, keys: torch.Tensor) -> Any:
        pairs = keys.tolist() if keys.dim() == 2 else [(number, 0) for number in keys.tolist()]
        samples: list[Any] = []
        try:
            with preserved_generators(with_torch=True):
                for number, epoch in pairs:
                    seed_sample(self.seed, epoch, number, with_torch=True)
                    samples.append(self.dataset[number])
            batch = self.collate(samples)
        except Exception as error:  # a dataset may raise anything
            if not is_of_user(error):
                raise
            # Here, since a loader process hands on no more of it than its text.
            numbers = [number for number, _ in pairs]
            which = ", ".join(map(str, numbers[len(samples) :][:1] or numbers))
            first = f"{type(error).__name__}: {message_of(error).strip()}".splitlines()[0]
            hint = _difference(samples) if len(samples) == len(numbers) else ""
            raise SampleError(f"data: {self.name}[{which}] raises {first}{place_of(error)}{hint}") from error
        if not isinstance(batch, dict) or not all(isinstance(key, str) for key in batch):
            found = f"with the keys {list(batch)}" if isinstance(batch, dict) else f"not a {type(batch).__name__}"
            raise DataError(
                f"data: a batch must be a dict by the names that the model's forward takes, {found}; give samples of "
                f"{shown(self.dataset)} as such dicts, or set data.collate; see {EXPERIMENT_PAGE}"
            )
        return batch


def _difference(samples: list[Any]) -> str:
    """The first key whose values differ in shape or type, or are None: the error of torch may mislead."""
    for key in samples[0] if isinstance(samples[0], dict) else ():
        values = [each.get(key) for each in samples]
        kinds = {str(tuple(each.shape)) if hasattr(each, "shape") else type(each).__name__ for each in values}
        if len(kinds) > 1 or "NoneType" in kinds:
            return f"; {key} is {' or '.join(sorted(kinds))}"
    return ""
