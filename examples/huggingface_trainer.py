"""Trains a tiny GPT-2 in several processes, with the Trainer of Hugging Face's transformers.

pip install 'redisacc[server,torch]' transformers accelerate
redisacc run --server --workers 2 -- python huggingface_trainer.py
"""

import hashlib
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from redisacc.torch.transformers import join

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


def main():
    model = build()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            learning_rate=0.01,
            warmup_steps=WARMUP,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=0,
        )
        trainer = Trainer(model, arguments, train_dataset=examples())
        join(trainer, NAME)
        trainer.train()
    weights = b"".join(each.detach().cpu().numpy().tobytes() for each in model.parameters())
    print(f"weights {hashlib.sha256(weights).hexdigest()[:12]}")


if __name__ == "__main__":
    main()
