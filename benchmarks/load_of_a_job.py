"""Measure how long the processes of a job take to build a model whose class must be proven, and one in the table.

Run by hand, on an idle machine: python benchmarks/load_of_a_job.py. The processes are forked from one that has imported
torch and transformers and called `install()`, and begin at the same moment. Times are in seconds, until the last of them has
its model.
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import torch
import transformers

import kernel_compat
from kernel_compat_prove.tiny import shrink

NAME = "flash_attention_reference"


class Own(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Not in the table, and not built as its base is."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)


def last_of(processes: int, model_class: type[Any]) -> float:
    """The seconds until each of so many processes has built a model."""
    reading, writing = os.pipe()
    children = []
    for _ in range(processes):
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)  # until the parent closes its end
            model_class._from_config(shrink(transformers.LlamaConfig()), attn_implementation=NAME)
            os._exit(0)
        children.append(child)
    start = time.perf_counter()
    os.close(writing)
    for child in children:
        _, status = os.waitpid(child, 0)
        assert status == 0
    os.close(reading)
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    kernel_compat.install(unproven="warn")
    print("processes  in the table  first load  kept proof")
    for processes in (1, 8, 64):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            known = last_of(processes, transformers.LlamaForCausalLM)
            first, kept = last_of(processes, Own), last_of(processes, Own)
        print(f"{processes:9}  {known:12.2f}  {first:10.2f}  {kept:10.2f}")


if __name__ == "__main__":
    main()
