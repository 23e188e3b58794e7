"""Trains a small convolutional network on scikit-learn's handwritten digits (8 × 8 pixels, ten classes)."""

import argparse

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class Digits(pl.LightningDataModule):
    """1,437 digits to train on and 360 to validate, the same split on every machine."""

    def __init__(self, batch_size: int, num_workers: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        train, val = train_test_split(range(len(labels)), test_size=0.2, random_state=0, stratify=labels)
        digits = [(images[part], torch.tensor(labels)[part]) for part in (train, val)]
        self.train, self.val = (TensorDataset(*part) for part in digits)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, self.batch_size, num_workers=self.num_workers)


class Classifier(pl.LightningModule):
    """Two convolutions and two linear layers: 55,000 parameters."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 96),
            nn.ReLU(),
            nn.Linear(96, 10),
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = functional.cross_entropy(self.network(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        scores = self.network(images)
        correct = (scores.argmax(1) == labels).float().mean()
        loss = functional.cross_entropy(scores, labels)
        # The mean over all workers, weighted by their batches' sizes.
        self.log_dict({"val_loss": loss, "val_acc": correct}, prog_bar=True, sync_dist=True, batch_size=len(labels))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of one worker's batch")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0, help="processes that load data")
    parser.add_argument("--log-dir", default="logs")
    args = parser.parse_args()

    pl.seed_everything(args.seed)
    trainer = pl.Trainer(max_epochs=args.epochs, log_every_n_steps=1, logger=CSVLogger(args.log_dir, name="digits"))
    trainer.fit(Classifier(args.lr), datamodule=Digits(args.batch_size, args.num_workers))
    if trainer.is_global_zero:
        print(f"validation accuracy {trainer.callback_metrics['val_acc']:.4f}")


if __name__ == "__main__":
    main()
