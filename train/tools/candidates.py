"""Fit the candidates of a drafter's LM head, which make its drafts cheaper, and write them into its checkpoint.

    python -m train.tools.candidates --checkpoint runs/stdlib-eagle --features runs/stdlib-features

The drafter answers prompts of the store's heldout/ in the decoding loop, once greedily and once sampled. Half of the
prompts give the second moment of what its LM head reads. The other half gives the recall by rank and number of
candidates: how often the LM head's first choice is among the candidates. The fastest pair with ``--recall`` is
written: model.safetensors gets candidates_a, candidates_c and candidates_lm_head, config.json the option candidates.
"""

from pathlib import Path

from drafters.cli.program import CommandLine, command, keeping, positive, run_program


def main(arguments: list[str] | None = None) -> None:
    """Decode, fit, print the recall, and write."""
    parser = CommandLine("train.tools.candidates", __doc__)
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder of the drafter; it is changed in place")
    parser.add_argument("--features", type=Path, required=True, help="feature store whose heldout/ has the prompts")
    parser.add_argument("--target", help="folder or Hub repository, if not the one that the drafter names")
    parser.add_argument("--recall", type=float, default=0.99, help="least recall of the LM head's first choice")
    parser.add_argument("--rank", type=positive, help="rank of the pair; default: the fastest with the recall")
    parser.add_argument("--count", type=positive, help="number of candidates; default: the fastest with the recall")
    parser.add_argument("--prompts", type=positive, default=128, help="most prompts")
    parser.add_argument("--new-tokens", type=positive, default=128, help="most tokens of an answer")
    parsed = parser.parse(arguments)
    if not (parsed.checkpoint / "config.json").is_file():
        raise ValueError(f"--checkpoint: {parsed.checkpoint} holds no config.json; give the folder of a drafter")
    if not 0 < parsed.recall <= 1:
        raise ValueError(f"--recall is {parsed.recall}; give a share above 0 and at most 1, for example 0.99")

    from train.watch.candidates import fit_candidates

    with keeping(lambda: f"the checkpoint is as it was, or finished; to start again: {command()}"):
        fit_candidates(parsed)


if __name__ == "__main__":
    run_program(main)
