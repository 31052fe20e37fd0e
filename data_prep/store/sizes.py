"""Sizes of a feature store before it is written: bytes per token of each state, and of the whole data set."""

from data_prep.store.manifest import ID_AND_MASK_BYTES, StoreManifest, state_bytes
from drafters.common.wording import size_text


def size_table(header: StoreManifest, tokens: int) -> str:
    """Describe the stores of ``tokens`` tokens in all: one line per state, the sum, and what int8 would save.

    Args:
        header: the manifest of one of the stores.
        tokens: number of tokens of all splits.
    """
    state, eight = state_bytes(header.hidden_size, header.dtype), state_bytes(header.hidden_size, "int8")
    rows = [("token id and loss mask", ID_AND_MASK_BYTES), *((name, state) for name in header.states.values())]
    rows.append((f"all, in {header.dtype}", sum(size for _, size in rows)))
    lines = [("state", "bytes per token", f"{tokens:,} tokens")]
    lines += [(name, f"{size:,}", size_text(size * tokens)) for name, size in rows]
    wide = max(len(name) for name, _, _ in lines)
    text = "\n".join(f"{name:<{wide}}  {size:>15}  {whole:>20}" for name, size, whole in lines)
    saved = (state - eight) * len(header.states)
    if saved > 0:
        left = rows[-1][1] - saved
        text += f"\nstore_dtype int8 saves {size_text(saved * tokens)} ({left:,} bytes per token are left)"
    return text
