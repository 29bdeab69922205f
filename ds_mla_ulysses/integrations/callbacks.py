"""Callbacks for the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..hf.moba import set_moba


class FullAttentionCallback(TrainerCallback):
    """Trains with MoBA first and with full attention from a fraction of the steps on, resumed runs included.

    Args:
        after: the fraction of all optimizer steps that run MoBA, 0 to 1; the next step is the first with full attention.

    Source: the MoBA/full hybrid training of arXiv 2502.13189, section 3.2.

    Raises:
        ValueError: a fraction outside 0 to 1; when training begins, a model without MoBA layers.
    """

    def __init__(self, after: float) -> None:
        if not 0 <= after <= 1:
            raise ValueError(f"after is the fraction of the steps that run MoBA, 0 to 1, got {after!r}.")
        self.after = after

    def runs_moba(self, step: int, steps: int) -> bool:
        """Whether step `step`, from 0 on, of `steps` runs MoBA."""
        # Rounded first: 0.28 * 25 is a little more than 7.
        return step < round(self.after * steps, 6)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        set_moba(model, self.runs_moba(state.global_step, state.max_steps))
