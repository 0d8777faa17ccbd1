"""The same job under Ray Train:  `pip install "ray[train]"; python ray_train.py --workers 4`.

Ray starts the workers and their process group (`TorchTrainer`); `init_dist` takes it as it is.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import ray.train
from ray.train import Checkpoint
from ray.train.torch import TorchConfig, TorchTrainer
from train import train

import scaletorch.dist as dist


def work(config: dict[str, int]) -> None:
    """Run on each Ray worker."""
    dist.init_dist()
    with tempfile.TemporaryDirectory() as folder:
        loss = train(config["steps"], Path(folder, "state.pt"))
        checkpoint = Checkpoint.from_directory(folder) if dist.is_main_process() else None
        metrics = {"loss": loss, "ranks": dist.get_world_size(), "local": dist.get_local_size()}
        ray.train.report(metrics, checkpoint=checkpoint)
    dist.cleanup_dist()  # leaves Ray's group to Ray


def main() -> None:
    """Train on Ray's workers and print what rank 0 reported."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpus", action="store_true", help="one GPU for each worker")
    arguments = parser.parse_args()
    trainer = TorchTrainer(
        work,
        train_loop_config={"steps": arguments.steps},
        torch_config=TorchConfig(backend="nccl" if arguments.gpus else "gloo"),
        scaling_config=ray.train.ScalingConfig(
            num_workers=arguments.workers, use_gpu=arguments.gpus
        ),
        run_config=ray.train.RunConfig(storage_path=tempfile.mkdtemp(prefix="ray-train-")),
    )
    metrics = trainer.fit().metrics
    print(
        f"Ray: {metrics['ranks']} ranks, {metrics['local']} on a node, loss {metrics['loss']:.4f}"
    )


if __name__ == "__main__":
    main()
