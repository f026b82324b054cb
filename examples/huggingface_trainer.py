"""Trains a tiny GPT-2 in several processes, with the Trainer of Hugging Face's transformers.

pip install 'redisacc[server,torch]' transformers accelerate
redisacc run --server --workers 2 -- python huggingface_trainer.py
"""

import hashlib
import tempfile

import torch
from torch.utils.data import IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers import get_linear_schedule_with_warmup as schedule

import redisacc.torch

NAME, STEPS, BATCH, WARMUP = "trainer", 40, 8, 4


def build():
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 12, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    # The Trainer reads it, to count the words that are predicted.
    model.loss_type = "ForCausalLM"
    return model


def examples():
    """Returns texts that count upwards, each in strides of its own."""
    begins, strides = torch.meshgrid(torch.arange(16), torch.arange(1, 5), indexing="ij")
    texts = (begins.reshape(-1, 1) + strides.reshape(-1, 1) * torch.arange(12)) % 16
    return [{"input_ids": text, "labels": text} for text in texts]


class Shares(IterableDataset):
    """The examples of this process, epoch after epoch, until the training is finished."""

    def __init__(self, data, optimizer):
        self.data, self.optimizer = data, optimizer
        self.sampler = optimizer.sampler(data, BATCH)

    def __iter__(self):
        while not self.optimizer.finished:
            yield from (self.data[index] for index in self.sampler)


class Follow(TrainerCallback):
    """Lets the Trainer count the steps of the training, which a process that is started again has not made itself."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def on_train_begin(self, args, state, control, **_):  # noqa: ARG002
        state.global_step = self.optimizer.training_step

    def on_step_end(self, args, state, control, **_):  # noqa: ARG002
        state.global_step = self.optimizer.training_step
        control.should_training_stop = self.optimizer.finished


def norm(parameters, *_):
    """Returns the norm that the Trainer logs. Its own function clips, which changes gradients that have been sent."""
    return torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])


def main():
    model, data = build(), examples()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    # clip_norm takes the place of max_grad_norm, which would clip the gradient of each process by itself.
    optimizer = redisacc.torch.Optimizer(inner, NAME, model, clip_norm=1.0, until=STEPS)
    scheduler = optimizer.resume(schedule(optimizer, WARMUP, STEPS))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            max_grad_norm=0,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=Shares(data, optimizer),
            optimizers=(optimizer, scheduler),
            callbacks=[Follow(optimizer)],
        )
        trainer.accelerator.clip_grad_norm_ = norm
        trainer.train()
    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
