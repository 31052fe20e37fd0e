"""Print the content of a feature store, finished or half written, or of all splits in a folder.

    python -m data_prep.inspect runs/stdlib-features/train [--verify] [--sample 64] [--dialogue 0] [--tokenizer PATH]

Counts and sizes come from the manifest and the shards' headers, statistics of the features from a sample of dialogues
spread over the store. One dialogue is decoded, with the trained tokens in colour. --verify reads every byte. The last
line is the verdict; the exit status is 1 if something is damaged. --own tests instead whether the answers are the
target's own, and prints no text; the exit status is 1 if they are not.
"""

from pathlib import Path

from data_prep.store.manifest import MANIFEST, read_manifest
from drafters.cli.program import CommandLine, command, keeping, positive, run_program


def main(arguments: list[str] | None = None) -> int:
    parser = CommandLine("data_prep.inspect", __doc__)
    parser.add_argument("store", type=Path, help="a store, or a folder of stores (the `out` of data_prep.features)")
    parser.add_argument("--verify", action="store_true", help="read every byte and compare the checksums")
    parser.add_argument("--own", action="store_true", help="only test whether the answers are the target's own")
    parser.add_argument("--sample", type=positive, default=64, help="dialogues for the statistics (default 64)")
    parser.add_argument("--dialogue", type=int, default=0, help="which one to decode (default 0, the first)")
    parser.add_argument("--tokenizer", help="folder or Hub repository, if not the target's")
    parsed = parser.parse(arguments)
    stores = find_stores(parsed.store)

    from data_prep.store.inspection import inspect_all
    from data_prep.store.ownership import check_own

    with keeping(lambda: f"nothing was changed; to start again: {command()}"):
        if not parsed.own:
            return inspect_all(stores, parsed)
        for store in stores:
            check_own(store)
        return 0


def find_stores(path: Path) -> list[Path]:
    """The store at ``path``, or the stores in its sub-folders; raises ValueError if there is none."""
    splits = [path] if (path / MANIFEST).is_file() else sorted(file.parent for file in path.glob(f"*/{MANIFEST}"))
    if not splits:
        read_manifest(path)  # raises the error
    return splits


if __name__ == "__main__":
    run_program(main)
