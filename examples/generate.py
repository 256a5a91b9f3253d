"""Let an exported model write, by `transformers` alone: nothing here knows Holdfast.

    python examples/generate.py runs/lm/hf/hf-latest --prompt "class Stack"

With --logits FILE it also leaves there what the model makes of the prompt, as `train_lm.py` does, to be compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Let an exported model write, by transformers alone.")
    parser.add_argument("directory", help="what was exported, or any other model that from_pretrained takes")
    parser.add_argument("--prompt", default="import os\n\n\ndef ", help="what it goes on with")
    parser.add_argument("--tokens", type=int, default=60, help="how much it writes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logits", type=Path, default=None, help="file for tokens and logits of the prompt")
    args = parser.parse_args()
    torch.set_num_threads(1)  # sums in one order, as in training

    tokenizer = AutoTokenizer.from_pretrained(args.directory)
    model = AutoModelForCausalLM.from_pretrained(args.directory, dtype="auto").eval()
    tokens = tokenizer(args.prompt, return_tensors="pt").input_ids
    if args.logits is not None:
        with torch.no_grad():
            torch.save({"tokens": tokens, "logits": model(input_ids=tokens).logits}, args.logits)
    torch.manual_seed(args.seed)
    options = {"max_new_tokens": args.tokens, "do_sample": True}
    written = model.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
    print(tokenizer.decode(written[0]))


if __name__ == "__main__":
    main()
