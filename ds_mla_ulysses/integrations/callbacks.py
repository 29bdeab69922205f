"""Callbacks for the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..errors import UlyssesTypeError, UlyssesValueError
from ..hf.moba import set_moba


class FullAttentionCallback(TrainerCallback):
    """Trains with MoBA for a fraction of the steps and with full attention afterwards, also in resumed runs.

    Args:
        after: the fraction of all optimizer steps that run MoBA, 0 to 1. The next step is the first one with full
            attention.

    Source: the hybrid training of MoBA and full attention in arXiv 2502.13189, section 3.2.

    Raises:
        TypeError: the fraction is not a number.
        ValueError: the fraction is not in 0 to 1. When training begins, also if the model has no MoBA layers.
    """

    def __init__(self, after: float) -> None:
        if not isinstance(after, (int, float)) or isinstance(after, bool):
            raise UlyssesTypeError(f"after must be the fraction of the steps that run MoBA, 0 to 1, got {after!r}.")
        if not 0 <= after <= 1:
            raise UlyssesValueError(f"after must be the fraction of the steps that run MoBA, 0 to 1, got {after!r}.")
        self.after = after

    def runs_moba(self, step: int, steps: int) -> bool:
        """Returns whether step `step` of `steps` runs MoBA. The first step is step 0."""
        # The product is rounded first, because 0.28 * 25 is slightly more than 7.
        return step < round(self.after * steps, 6)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Switches the model's MoBA layers for the step that begins."""
        set_moba(model, self.runs_moba(state.global_step, state.max_steps))


class HiddenLabelSmoothing(TrainerCallback):
    """Sets label_smoothing_factor of the arguments to 0 until training begins; `wrap_init` in `trainer.py` says why."""

    def __init__(self, args: TrainingArguments) -> None:
        self._factor = args.label_smoothing_factor
        args.label_smoothing_factor = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Puts the factor back."""
        args.label_smoothing_factor = self._factor
