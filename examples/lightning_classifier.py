"""Trains a small network in several processes, with the Trainer of Lightning.

pip install 'redisacc[server,torch]' lightning
redisacc run --server --workers 2 -- python lightning_classifier.py
"""

import hashlib

import lightning
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import redisacc.torch

NAME, EPOCHS, BATCH = "lightning", 6, 8


def examples():
    x = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(dim=1))


def rate(step):
    return 0.97**step


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
        self.data = examples()

    def training_step(self, batch, _=None):
        x, y = batch
        return cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        inner = torch.optim.AdamW(self.parameters(), lr=0.02)
        # clip_norm takes the place of Trainer(gradient_clip_val=).
        self.shared = redisacc.torch.Optimizer(inner, NAME, self, clip_norm=1.0)
        scheduler = self.shared.resume(torch.optim.lr_scheduler.LambdaLR(self.shared, rate))
        return {"optimizer": self.shared, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    # Lightning calls it after configure_optimizers.
    def train_dataloader(self):
        return DataLoader(self.data, BATCH, sampler=self.shared.sampler(self.data, BATCH))


def main():
    model = Classifier()
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
