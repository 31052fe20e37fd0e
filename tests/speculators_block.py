"""Run in the environment of speculators: what its own DFlash or DFlash2 class computes for an exported folder.

python speculators_block.py FOLDER INPUTS OUT    (safetensors: states, ids, loss_mask -> hidden, places; of DFlash2 also
previous, candidates, scores)
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel


@torch.no_grad()
def main() -> None:
    """Run the blocks behind the anchors that the class draws."""
    folder, inputs, out = sys.argv[1:]
    torch.manual_seed(0)
    model = SpeculatorModel.from_pretrained(folder, torch_dtype=torch.float32).eval()
    given = load_file(inputs)
    states, ids = given["states"], given["ids"]
    hidden, logits, _, _, places = model._backbone_forward(
        states,
        ids,
        given["loss_mask"],
        torch.zeros(1, ids.shape[1], model.config.transformer_layer_config.hidden_size),
        torch.zeros_like(ids),
        max_anchors=5,
    )
    found = {"hidden": hidden.contiguous(), "places": places}
    if hasattr(model, "candidate_selector"):  # any tokens before the slots
        found["previous"] = ids[:, : hidden.shape[1]].contiguous()
        pair = model.candidate_selector.select(logits, hidden, found["previous"])
        found |= dict(zip(("candidates", "scores"), (part.contiguous() for part in pair), strict=True))
    save_file(found, out)


if __name__ == "__main__":
    main()
