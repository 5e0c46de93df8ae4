"""The peer's side of `bench.peer`: TRL's GRPOTrainer on the embedded task. Runs in the peer's own environment.

    python bench/peer_trl.py JOB.json

The job names the model folder, the prompts, and the settings that both sides share. Each optimizer step writes a line
with its time, mean reward and tokens.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyrefly: ignore[missing-import]

ANSWER_MARK = "|"


class Steps(TrainerCallback):
    """Writes a line for each step."""

    def __init__(self, file: Path):
        self._file = file.open("w", buffering=1)
        self._tokens = 0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """The first step starts."""
        self._file.write(json.dumps({"at": time.time(), "begin": True}) + "\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """A step has ended."""
        if "reward" in logs:
            tokens, self._tokens = int(logs["num_tokens"]) - self._tokens, int(logs["num_tokens"])
            self._file.write(json.dumps({"at": time.time(), "reward": float(logs["reward"]), "tokens": tokens}) + "\n")


def verified(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for each completion whose text after the last bar is the answer."""
    ends = [completion.rpartition(ANSWER_MARK) for completion in completions]
    return [float(bool(mark) and end == right) for (_, mark, end), right in zip(ends, answer, strict=True)]


def main(job: dict[str, Any]) -> None:
    """Train as the job says."""
    first = int(os.environ.get("RANK", 0)) == 0
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    # pyrefly: ignore[missing-attribute]
    tokenizer.padding_side = "left"
    records = [json.loads(line) for line in Path(job["prompts"]).read_text().splitlines()]
    batch = job["groups_per_step"] * job["group_size"]
    settings = GRPOConfig(
        output_dir=job["folder"],
        use_cpu=True,
        bf16=False,
        seed=job["seed"],
        max_steps=job["steps"],
        per_device_train_batch_size=batch // ranks,
        gradient_accumulation_steps=1,
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        temperature=1.0,
        max_grad_norm=job["max_grad_norm"],
        gradient_checkpointing=False,  # the default saves memory that a tiny model does not need, and costs time
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=job["lr"], betas=job["betas"], weight_decay=job["weight_decay"], foreach=True
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, job["lr_factors"].__getitem__)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=verified,
        args=settings,
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
        optimizers=(optimizer, schedule),
        callbacks=[Steps(Path(job["steps_file"]))] if first else [],
    )
    trainer.train()
    sys.stdout.flush()
    os._exit(0)  # the teardown of a group of processes aborts now and then, after all is measured


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
