"""Apertus by its own tensor parallel plan: xIELU's gradients are unsummed (transformers 5.24.0)."""

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import ApertusConfig, ApertusForCausalLM
from transformers.distributed import DistributedConfig

from scaletorch import bisect

torch.manual_seed(0)
sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
model: Any = ApertusForCausalLM(ApertusConfig(**sizes, num_attention_heads=4))
ids, options = torch.randint(32, (4, 8)), {"dtype": torch.float64}
model.double().save_pretrained(folder := sys.argv[1] + ".model")
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    summed: Any = {"model.layers.*.mlp.act_fn": "replicated_with_grad_allreduce"}
    plan = summed if "--mended" in sys.argv else "auto"
    options["distributed_config"] = DistributedConfig(tp_size=2, tp_plan=plan)
    dist.barrier()  # wait until the model is written
model = ApertusForCausalLM.from_pretrained(folder, **options)
with bisect.record(sys.argv[1], model) as tape:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    tape.put("loss", loss)
