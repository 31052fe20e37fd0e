"""Run in the environment of speculators: hidden states of its own DFlash class for an exported folder.

python speculators_block.py FOLDER INPUTS OUT    (safetensors: states, ids, loss_mask -> hidden, places)
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
    hidden, _, _, _, places = model._backbone_forward(
        states,
        ids,
        given["loss_mask"],
        torch.zeros(1, ids.shape[1], model.config.transformer_layer_config.hidden_size),
        torch.zeros_like(ids),
        max_anchors=5,
    )
    save_file({"hidden": hidden.contiguous(), "places": places}, out)


if __name__ == "__main__":
    main()
