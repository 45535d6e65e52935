"""LLaMA-Factory's supervised fine-tuning with a loss from hidden states, on a CPU, against the same training with logits.

    python examples/with_llamafactory.py                # the check, on a random Llama
    python examples/with_llamafactory.py train.yaml     # train as `llamafactory-cli train train.yaml` does
"""
import json
import logging
import random
import sys
import tempfile
from pathlib import Path

import torch

import fusedloss as fl


def patched(load_model):
    "The function of LLaMA-Factory that loads a model, which is patched if it will be trained"
    def load(tokenizer, model_args, finetuning_args, is_trainable=False, add_valuehead=False):
        model = load_model(tokenizer, model_args, finetuning_args, is_trainable, add_valuehead)
        if not is_trainable:
            return model
        if finetuning_args.use_asft_loss or model_args.enable_liger_kernel or model_args.use_unsloth:
            raise ValueError(
                "expected no use_asft_loss, which needs logits and without them returns another loss, "
                "and neither enable_liger_kernel nor use_unsloth, which replace the forward")
        print("fusedloss patched", type(model).__name__)
        return fl.integrations.transformers.patch(model)
    return load


def install():
    "Patch what pre-training and supervised fine-tuning load; rewards, preferences and PPO need logits"
    import llamafactory.train.pt.workflow as pt
    import llamafactory.train.sft.workflow as sft
    for stage in (pt, sft):
        stage.load_model = patched(stage.load_model)


def toy(folder):
    "A random Llama, its tokenizer and a data set with answers of different lengths, in a folder"
    from tokenizers import models, pre_tokenizers, Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    words = ["<s>", "</s>", "<pad>", "<unk>", *(f"w{i}" for i in range(120))]
    of_words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    of_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=of_words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>").save_pretrained(folder / "model")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, initializer_range=0.2)).save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [dict(instruction=" ".join(draw.choices(words[4:], k=3)), input="", output=" ".join(draw.choices(words[4:], k=draw.randint(1, 20)))) for _ in range(32)]
    (folder / "rows.json").write_text(json.dumps(rows))
    (folder / "dataset_info.json").write_text(json.dumps({"toy": {"file_name": "rows.json"}}))


def trained(folder, name, **changed):
    "Losses of steps, and what training added to the weights"
    from llamafactory.train.tuner import run_exp
    from safetensors.torch import load_file
    run_exp(dict(
        model_name_or_path=str(folder / "model"), stage="sft", do_train=True, finetuning_type="full", dataset="toy", dataset_dir=str(folder),
        template="empty", cutoff_len=64, output_dir=str(folder / name), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
        learning_rate=0.5, optim="sgd", lr_scheduler_type="constant", logging_steps=1, report_to="none", save_strategy="no", use_cpu=True,
        bf16=False, preprocessing_num_workers=1, dataloader_pin_memory=False, disable_tqdm=True, lora_dropout=0.0) | changed)
    log = json.loads((folder / name / "trainer_state.json").read_text())["log_history"]
    adapter = folder / name / "adapter_model.safetensors"
    after = load_file(adapter if adapter.exists() else folder / name / "model.safetensors")
    before = load_file(folder / "model" / "model.safetensors")
    return [torch.tensor([entry["loss"] for entry in log if "loss" in entry]), *(v - before.get(k, 0) for k, v in after.items())]


def main(arguments):
    install()
    if arguments:
        from llamafactory.train.tuner import run_exp
        return run_exp()
    import llamafactory.train.sft.workflow as sft
    from importlib.metadata import version
    logging.disable(logging.CRITICAL)
    lines = [f"llamafactory {version('llamafactory')}"]
    load_patched, load_model = sft.load_model, sft.load_model.__closure__[0].cell_contents
    with tempfile.TemporaryDirectory() as name:
        toy(folder := Path(name))
        for kind in ("full", "lora"):
            results = []
            for how, load in (("logits", load_model), ("patched", load_patched)):
                sft.load_model = load
                results.append(trained(folder, f"{kind}, {how}", finetuning_type=kind))
            error = max(((a - b).norm() / b.norm()).item() for a, b in zip(*reversed(results)))
            lines.append(f"{kind}: {error:.0e} from LLaMA-Factory with logits")
        try:
            trained(folder, "asft", use_asft_loss=True)
        except ValueError as refused:
            lines.append(f"use_asft_loss: {refused}")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
