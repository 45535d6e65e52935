"""Axolotl's supervised fine-tuning with a loss from hidden states, on a CPU, against the same training with logits.

    python examples/with_axolotl.py

In a configuration, where this file's folder is on PYTHONPATH:

    plugins:
      - with_axolotl.FusedLossPlugin
"""
import logging
import os
import tempfile
from pathlib import Path

import torch

import fusedloss as fl
from axolotl.integrations.base import BasePlugin


class FusedLossPlugin(BasePlugin):
    "Patches the model after adapters have been added, and before anything wraps it"
    def post_model_load(self, cfg, model):
        others = [name for name in ("cut_cross_entropy", "liger_fused_linear_cross_entropy", "liger_cross_entropy", "chunked_cross_entropy", "use_eaft", "kd_trainer") if cfg.get(name)]
        if others or cfg.rl:
            raise ValueError(f"plugins: expected no other loss beside FusedLossPlugin, got {', '.join(others) or cfg.rl}")
        fl.integrations.transformers.patch(model)
        print("fusedloss patched", type(model).__name__)


def trained(folder, name, **changed):
    "Losses of steps, and what training added to the weights"
    from axolotl.cli.config import prepare_plugins
    from axolotl.common.datasets import load_datasets
    from axolotl.integrations.base import PluginManager
    from axolotl.train import train
    from axolotl.utils.config import normalize_config, validate_config
    from axolotl.utils.dict import DictDefault
    cfg = DictDefault(dict(
        base_model=str(folder / "model"), datasets=[dict(path=str(folder / "rows.json"), ds_type="json", type="alpaca")],
        dataset_prepared_path=str(folder / "prepared"), output_dir=str(folder / name), micro_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=0.5, optimizer="sgd", lr_scheduler="constant", sequence_len=256, val_set_size=0, bf16=False, fp16=False, tf32=False,
        attn_implementation="eager", logging_steps=1, save_strategy="no", seed=0, use_tensorboard=False) | changed)
    PluginManager.get_instance().plugins.clear()
    prepare_plugins(cfg)
    cfg = validate_config(cfg)
    normalize_config(cfg)
    model, _, trainer = train(cfg=cfg, dataset_meta=load_datasets(cfg=cfg))
    from safetensors.torch import load_file
    before = load_file(folder / "model" / "model.safetensors")
    losses = torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    return [losses, *(p.detach().cpu() - before.get(k, 0) for k, p in model.named_parameters() if p.requires_grad)]


def main():
    from importlib.metadata import version
    os.environ["AXOLOTL_DO_NOT_TRACK"] = "1"
    from with_llamafactory import toy
    lines = [f"axolotl {version('axolotl')}"]
    plugins = dict(plugins=["with_axolotl.FusedLossPlugin"])
    with tempfile.TemporaryDirectory() as name:
        toy(folder := Path(name))
        kinds = {"full": {}, "lora": dict(adapter="lora", lora_r=4, lora_alpha=8, lora_target_modules=["q_proj", "down_proj"])}
        for kind, how in kinds.items():
            expected, found = (trained(folder, f"{kind} {i}", **how, **more) for i, more in enumerate(({}, plugins)))
            error = max(((a - b).norm() / b.norm()).item() for a, b in zip(found, expected))
            lines.append(f"{kind}: {error:.0e} from Axolotl with logits")
    print(*lines, sep="\n")


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main()
