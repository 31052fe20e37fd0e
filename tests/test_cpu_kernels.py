"""The CPU kernels against float64, over odd shapes, and what happens without them."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from conformance import NO_EOS, prompt, rows_of
from torch import Tensor

from drafters import TargetModel, generate, make_drafter
from drafters.cpu import kernels as cpu_kernels

attend = cpu_kernels.FewRows(16)
BOUND = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


def attention(queries: Tensor, keys: Tensor, values: Tensor, see: Tensor, scale: float) -> Tensor:
    """In float64; ``see [B, R, slots]``."""
    groups = queries.shape[2] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(groups, dim=1) for x in (keys, values))
    scores = torch.einsum("brhd,bhsd->bhrs", queries.double(), keys) * scale
    weights = scores.masked_fill(~see[:, None], -torch.inf).softmax(-1)
    return torch.einsum("bhrs,bhsd->brhd", weights, values)


def operands(rows: int, groups: int, width: int, ends: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries that are part of a wider tensor; keys and values of a cache with more slots, which hold nan."""
    batch, key_heads = len(ends), 3
    queries = torch.randn(batch, rows, key_heads * (groups + 1), width).to(dtype)[:, :, : key_heads * groups]
    cache = torch.randn(2, batch, key_heads, max(ends) + 7, width).to(dtype)
    for b, end in enumerate(ends):
        cache[:, b, :, end:] = torch.nan
    return queries, cache[0], cache[1]


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize(
    ("rows", "groups", "width", "ends"),
    [
        (1, 3, 64, [1, 2, 15, 16, 17, 255, 256, 257, 600]),
        (1, 1, 128, [40]),
        (5, 1, 96, [5, 513, 258]),
        (4, 4, 16, [33]),
    ],
)
def test_attention_of_a_chain(dtype: torch.dtype, rows: int, groups: int, width: int, ends: list[int]) -> None:
    """Catches slots beyond a row's length read, a chunk of a long row left out, and a row that sees the next one."""
    queries, keys, values = operands(rows, groups, width, ends, dtype)
    queries[0] *= 30  # weights of zero and one
    found = attend(queries, keys, values, None, torch.tensor(ends), 0.2)
    for b, end in enumerate(ends):
        see = torch.arange(end) <= end - rows + torch.arange(rows)[:, None]
        one = slice(b, b + 1)
        wanted = attention(queries[one], keys[one, :, :end], values[one, :, :end], see[None], 0.2)
        gap = (found[one].double() - wanted).abs().max() / wanted.abs().max()
        assert gap < (BOUND[dtype] if b else 10 * BOUND[dtype])  # scores of 30 times the size round by as much more


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("shared", [True, False])
def test_attention_of_a_tree(dtype: torch.dtype, shared: bool) -> None:
    """Catches a bias of another row, batch row or chunk, and weights left on a chunk that is hidden altogether."""
    ends, rows, groups = ([300, 300] if shared else [300, 290]), 5, 3
    queries, keys, values = operands(rows, groups, 32, ends, dtype)
    see = torch.rand(1 if shared else 2, rows, 300) < 0.5
    see[:, 1, :256] = False
    see[:, :, 280] = True
    bias = torch.zeros(see.shape).masked_fill_(~see, -torch.inf).to(dtype)[:, None].repeat(1, 1, groups, 1)
    found = attend(queries, keys, values, bias, torch.tensor(ends), 0.2)
    for b, end in enumerate(ends):
        one = slice(b, b + 1)
        wanted = attention(
            queries[one], keys[one, :, :end], values[one, :, :end], see[b % len(see), :, :end][None], 0.2
        )
        assert (found[one].double() - wanted).abs().max() < BOUND[dtype] * wanted.abs().max()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_attends_as_alone_to_the_last_bit(threads: int) -> None:
    """Catches work split by the longest row or by the threads: greedy tokens would depend on who else is there."""
    ends = [700, 3, 256, 511]
    queries, keys, values = operands(1, 3, 64, ends, torch.float32)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = attend(queries, keys, values, None, torch.tensor(ends), 0.125)
    finally:
        torch.set_num_threads(before)
    for b, end in enumerate(ends):
        one = slice(b, b + 1)
        alone = attend(queries[one], keys[one], values[one], None, torch.tensor([end]), 0.125)
        assert torch.equal(together[b], alone[0])


needs_tiles = pytest.mark.skipif(cpu_kernels.pack(torch.zeros(32, 32).bfloat16()) is None, reason="no AVX-512")


def weights(outputs: int, inputs: int) -> dict[int, tuple[cpu_kernels.Tiles, Tensor]]:
    """By bits: tiles, and the same weight in float64."""
    whole = torch.randn(outputs, inputs).bfloat16()
    eighths, scales = torch.randint(-127, 128, (outputs, inputs)).to(torch.int8), torch.rand(outputs)
    fourths = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
    steps, middles = torch.rand(outputs, inputs // 32).bfloat16(), torch.randn(outputs, inputs // 32).bfloat16()
    spread = (fourths.double().view(outputs, -1, 32) - 8) * steps.double()[..., None] + middles.double()[..., None]
    return {
        16: (cpu_kernels.Tiles(whole), whole.double()),
        8: (cpu_kernels.Tiles(eighths, scales), eighths.double() * scales.double()[:, None]),
        4: (cpu_kernels.Tiles(fourths, steps, middles), spread.view(outputs, inputs)),
    }


@needs_tiles
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_products(level: str, bits: int) -> None:
    """Catches tiles in another order, rows of a last tile that is not full, outputs written beyond the last."""
    tiles, weight = weights(70, 96)[bits]
    for rows in (1, 2, 16, 17, 32, 33, 70):
        x = torch.randn(rows, 96).bfloat16()
        wanted = x.double() @ weight.T
        rounding = 2**-7 if bits == 4 else 2**-8  # of the results, and in int4 of the weight
        assert (tiles(x).double() - wanted).abs().max() < rounding * wanted.abs().max()


@needs_tiles
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_a_row_is_multiplied_as_in_company(level: str, bits: int) -> None:
    """Catches products that depend on how many rows are verified at once: drafting would leave plain decoding's path
    more often than it need do.
    """
    tiles = weights(96, 576)[bits][0]
    x = torch.randn(16 if bits == 4 else 70, 576).bfloat16()  # in int4 more rows have the weight rounded to bf16
    together = tiles(x)
    assert all(torch.equal(together[:rows], tiles(x[:rows])) for rows in (2, 5, 16, 26, 33, 64) if rows <= len(x))
    alone = torch.cat([tiles(row[None]) for row in x])
    assert (alone == together).float().mean() > 0.99  # summed in another order, then rounded to bf16


@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("width", [1, 15, 16, 33, 4100])
def test_argmax(dtype: torch.dtype, width: int) -> None:
    """Catches the last of equal values, which would make trees and chains disagree, and values behind whole vectors."""
    for rows in (1, 2, 5):
        logits = torch.randn(rows, 3, width).to(dtype)
        logits[0, 0, width // 2 :] = logits[0, 0].max()
        logits[0, 1] = -torch.inf
        logits[0, 2, width // 3] = torch.nan
        logits[rows - 1, 0, width - 1] = 1e30
        for given in (logits, logits.transpose(0, 1)):
            found = cpu_kernels.most_likely(given)
            assert found is not None and torch.equal(found, given.argmax(-1))


@pytest.fixture
def without() -> Iterator[None]:
    """``library`` forgets what it found, before and after."""
    cpu_kernels.library.cache_clear()
    yield
    cpu_kernels.library.cache_clear()


@pytest.mark.parametrize("reason", ["off", "no compiler", "an error", "no folder"])
def test_without_them_torch_does_it(
    reason: str, without: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Catches a target that cannot decode without a compiler, says so at every layer, or does not say why."""
    said = {
        "no compiler": "there is no compiler 'g++-0'",
        "an error": "cannot compile wrong.cpp",
        "no folder": "Not a d",
    }
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if reason == "off":
        monkeypatch.setenv("DRAFTERS_CPU_KERNELS", "0")
    elif reason == "no compiler":
        monkeypatch.setenv("CXX", "g++-0")
    elif reason == "an error":
        monkeypatch.setattr(cpu_kernels, "SOURCE", tmp_path / "wrong.cpp")
        (tmp_path / "wrong.cpp").write_text("int main( {")
    else:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        plain = TargetModel(tiny.build("llama"))
    lines = [record.getMessage() for record in caplog.records if "torch's kernels" in record.getMessage()]
    assert len(lines) == (reason != "off") and said.get(reason, "") in "".join(lines)
    assert plain.layers[0].few_rows == 0 and not list(tmp_path.glob("**/*.so"))
    monkeypatch.undo()
    cpu_kernels.library.cache_clear()
    quick = TargetModel(tiny.build("llama"))
    assert quick.layers[0].few_rows == 8
    prompts = [prompt(9), prompt(30, 1)]
    each = [
        generate(target, make_drafter("autoregressive", target), prompts, max_new_tokens=20, eos_token_id=NO_EOS)
        for target in (plain, quick)
    ]
    assert rows_of(each[0]) == rows_of(each[1])


def test_they_share_the_threads_of_torch() -> None:
    """Catches a second OpenMP in the process, whose waiting threads would take the cores from the first one's."""
    assert cpu_kernels.library() is not None
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    loaded = {line[5] for line in lines if len(line) > 5}
    found = {path for path in loaded if Path(path).name.startswith(("libgomp", "libiomp"))}
    torchs = {path for path in found if path.startswith(str(Path(torch.__file__).resolve().parent))}
    assert {cpu_kernels._openmp()} == (torchs or found)
