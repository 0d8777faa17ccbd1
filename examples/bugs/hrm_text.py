"""HRM-Text by its own tensor parallel plan: fused weights load wrongly (transformers 5.24.0)."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import HrmTextConfig, HrmTextForCausalLM
from transformers.distributed import DistributedConfig

from scaletorch import bisect

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
model: Any = HrmTextForCausalLM(HrmTextConfig(**sizes, num_attention_heads=4, head_dim=4)).double()
ids, folder, options = torch.randint(32, (4, 8)), sys.argv[1] + ".model", {"dtype": torch.float64}
fused = "--mended" not in sys.argv  # original checkpoints fuse q, k, v and gate into one weight
model.save_pretrained(folder, save_original_format=fused)
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    options["distributed_config"] = DistributedConfig(tp_size=2, tp_plan="auto")
    dist.barrier()  # wait until the model is written
model = HrmTextForCausalLM.from_pretrained(folder, **options)
with bisect.record(sys.argv[1], model) as tape:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    tape.put("loss", loss)
