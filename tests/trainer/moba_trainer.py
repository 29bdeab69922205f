"""examples/train_trainer.py with MoBA in the first half of the steps: `--attn moba` and its other options."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import train_trainer
from transformers import Trainer

import ds_mla_ulysses as dmu
from ds_mla_ulysses.verify import run


class MoBATrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs, callbacks=[dmu.FullAttentionCallback(0.5)])


def main() -> None:
    dmu.register_moba(dmu.MoBAConfig(8, 3))
    train_trainer.Trainer = MoBATrainer
    train_trainer.main()


if __name__ == "__main__":
    run(main)
