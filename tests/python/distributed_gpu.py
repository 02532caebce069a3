"""The tests of tandem.distributed on GPUs and NCCL, started by ``scripts/gpu ranks N``."""

from __future__ import annotations

import os
import time

import distributed_cases as cases
import torch
import torch.distributed as dist


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    for dtype in (torch.bfloat16, torch.float16):
        for feature in cases.FEATURES:
            for name, lengths in (("dense", cases.DENSE), ("packed", cases.PACKED)):
                began = time.monotonic()
                cases.right(rank, feature, lengths, dtype, None, "cuda")
                if rank == 0:
                    print(
                        f"passed: {feature}, {name}, {dtype} ({time.monotonic() - began:.1f} s)", flush=True
                    )
    cases.same_bits(rank, "cuda")
    if rank == 0:
        print("passed: same bits in every run", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
