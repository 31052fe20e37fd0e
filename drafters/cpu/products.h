// A few rows against a large weight in bf16, int8 or int4: with a matrix unit (AMX), or by vectors.

#pragma once

#include <immintrin.h>
#include <omp.h>

#include <vector>

#include "dots.h"

namespace {

// A weight [outputs, inputs] and what is added to its product.
struct Product {
    const uint8_t *tiles;
    const float *scales;  // [outputs, padded to 32], of int8; or null
    const bf16 *bias;     // [outputs], or null
    int64_t inputs, outputs, bits;
};

// A weight [outputs, inputs] is kept as tiles of 16 outputs and 32 inputs: [outputs / 32][inputs / 32][2] of them, each in
// the order [input / 2][output][input % 2] that the matrix unit wants. `spread` makes bf16 of a tile that is kept smaller.
constexpr int64_t NEAR = 3 << 19;  // bytes of rows, beside which a cache of 2 MB has room for a panel of weights
constexpr int SCALED = 16;  // rows, up to which a product in int4 scales sums, and not weights

// Values [rows, width] by 32 columns: one row behind the other, or one block of columns [rows, 32] behind the other, as the
// matrix unit likes them: for every width, a tile is 1 KB in one piece, and rows of a panel do not share a cache set.
template <class Value>
struct Columns {
    Value *data;
    int64_t row, block;  // values from one row to the next, from one block to the next

    Columns() : data(nullptr), row(0), block(0) {}
    Columns(Value *data, int64_t row, int64_t block) : data(data), row(row), block(block) {}
    template <class Other>
    Columns(const Columns<Other> &other) : data(other.data), row(other.row), block(other.block) {}
    Value *at(int64_t r, int64_t b) const { return data + r * row + b * block; }
    Columns from(int64_t r) const { return {data ? data + r * row : nullptr, row, block}; }
};
template <class Value>
Columns<Value> by_rows(Value *data, int64_t width) { return {data, width, 32}; }
template <class Value>
Columns<Value> by_blocks(Value *data, int64_t rows) { return {data, 32, 32 * rows}; }

// Before tiles are loaded from what was just written: GCC does not know that those instructions read memory.
inline void written() { asm volatile("" ::: "memory"); }

// Each kind of weight: bytes of a tile, and what is in row i of its 16. A row is for inputs 2i and 2i + 1.
struct Whole {  // bf16 as it is
    static constexpr int BYTES = TILE;
    static const uint8_t *open(const uint8_t *tile) { return tile; }
    static __m512i row(const uint8_t *tile, int i) { return _mm512_loadu_si512(tile + 64 * i); }
};

struct Eighths {  // int8, exact in bf16: the scale of each output is for the sums
    static constexpr int BYTES = 512;
    static const uint8_t *open(const uint8_t *tile) { return tile; }
    static __m512i row(const uint8_t *tile, int i) {
        const auto *bytes = (const __m128i *)tile + 2 * i;
        return pair(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes[0])), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes[1])));
    }
    static void spread(const uint8_t *tile, __m512i *to) {
        for (int i = 0; i < 16; i++) to[i] = row(tile, i);
    }
};

struct Fourths {  // 16 scales and 16 middles (of value 8), then int4: a byte holds a value of an even row and of the next
    static constexpr int BYTES = 320;
    static __m512i both(const uint8_t *tile, int i) {  // rows 2i and 2i + 1
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(tile + 64 + 32 * i)));
    }
    // The values and 128, which share an exponent in bf16, so that their bits are the last of the mantissa.
    static __m512i whole(__m512i bits) {
        const __m512i mask = _mm512_set1_epi16(15), exponent = _mm512_set1_epi16(0x4300);
        return _mm512_ternarylogic_epi32(bits, mask, exponent, 0xea);  // bits & mask | exponent
    }
    static __m512i row(const uint8_t *tile, int i) {
        return whole(i % 2 ? _mm512_srli_epi16(both(tile, i / 2), 4) : both(tile, i / 2));
    }
    static void spread_whole(const uint8_t *tile, __m512i *to) {
        for (int i = 0; i < 8; i++) {
            const __m512i bits = both(tile, i);
            to[2 * i] = whole(bits);
            to[2 * i + 1] = whole(_mm512_srli_epi16(bits, 4));
        }
    }
    // A group's part of a product: `sum` is that of its inputs times values and 128, `of_group` that of its inputs.
    struct Scaling {
        Floats scale, offset;
        explicit Scaling(const uint8_t *tile) : scale(load((const bf16 *)tile)) {
            offset = load((const bf16 *)tile + 16) - 136.0f * scale;
        }
        Floats operator()(Floats sum, float of_group) const { return scale * sum + offset * of_group; }
    };
    static void spread(const uint8_t *tile, __m512i *to) {
        const Floats scale = load((const bf16 *)tile), offset = load((const bf16 *)tile + 16) - 8.0f * scale;
        const Ints first = {0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7}, second = first + 8;
        const Floats scales[2] = {__builtin_shuffle(scale, first), __builtin_shuffle(scale, second)};
        const Floats offsets[2] = {__builtin_shuffle(offset, first), __builtin_shuffle(offset, second)};
        const auto *bytes = (const __m128i *)(tile + 64);
        for (int i = 0; i < 8; i++) {
            Floats even[2], odd[2];
            for (int half = 0; half < 2; half++) {
                const Ints values = (Ints)_mm512_cvtepu8_epi32(bytes[2 * i + half]);
                even[half] = __builtin_convertvector(values & 15, Floats) * scales[half] + offsets[half];
                odd[half] = __builtin_convertvector(values >> 4, Floats) * scales[half] + offsets[half];
            }
            to[2 * i] = pair((__m512)even[0], (__m512)even[1]);
            to[2 * i + 1] = pair((__m512)odd[0], (__m512)odd[1]);
        }
    }
};

// Weights that are wanted soon, a few lines at a time: those of the next panel, while this one's are multiplied.
struct Fetch {
    const uint8_t *at = nullptr, *end = nullptr;
    int64_t lines = 0;

    void step() {
        for (int64_t i = 0; i < lines && at < end; i++, at += 64) _mm_prefetch(at, _MM_HINT_T1);
    }
};

// How often in a step: all at once they keep a processor's few slots for them full, and what is wanted now waits.
#ifdef __AMX_BF16__
constexpr int FETCHES = 1;
#else
constexpr int FETCHES = 16;
#endif

// One row times 32 outputs, by products of vectors: nothing that is kept smaller has to be written out first.
template <class Kind>
void multiply_row(Columns<const bf16> x, const uint8_t *packed, int64_t inputs, const float *of_groups, Fetch &fetch, float *sums) {
    Floats total[2] = {};
    for (int64_t step = 0; step < inputs / IN; step++) {
        for (int half = 0; half < 2; half++) {
            const uint8_t *tile = packed + (2 * step + half) * Kind::BYTES;
            __m512 part[2] = {};
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) {
                if ((16 * half + i) % (32 / FETCHES) == 0) fetch.step();
                const Pairs inputs = pairs(both_of(x.at(0, step) + 2 * i));
                part[i % 2] = add_products(part[i % 2], inputs, pairs(Kind::row(tile, i)));
            }
            const Floats sum = (Floats)part[0] + (Floats)part[1];
            if constexpr (Kind::BYTES == Fourths::BYTES)
                total[half] += typename Kind::Scaling(tile)(sum, of_groups[step]);
            else
                total[half] += sum;
        }
    }
    for (int half = 0; half < 2; half++) store(total[half], sums + 16 * half);
}

#ifdef __AMX_BF16__
// A few rows times 32 outputs in int4: values are multiplied as they are, and each group's sums are scaled, which are
// fewer than the weights.
inline void multiply_few(Columns<const bf16> x, const uint8_t *packed, uint8_t *tiles, int64_t rows, int64_t inputs,
                         const float *of_groups, Fetch &fetch, float (*sums)[OUT]) {
    constexpr int64_t AHEAD = 2, RING = 4;  // steps
    alignas(64) float parts[RING][2][SCALED][16];
    const int64_t steps = inputs / IN;
    const auto tile = [&](int64_t step, int half) { return packed + (2 * step + half) * Fourths::BYTES; };
    const auto spread = [&](int64_t step) {
        if (step < steps)
            for (int half = 0; half < 2; half++)
                Fourths::spread_whole(tile(step, half), (__m512i *)(tiles + (2 * (step % RING) + half) * TILE));
        written();
    };
    const auto add = [&](int64_t step) {
        for (int half = 0; half < 2; half++) {
            const Fourths::Scaling scaling(tile(step, half));
            for (int64_t row = 0; row < rows; row++) {
                float *sum = sums[row] + 16 * half;
                store(load(sum) + scaling(load(parts[step % RING][half][row]), of_groups[row * steps + step]), sum);
            }
        }
    };
    std::memset(sums, 0, rows * sizeof(*sums));
    for (int64_t step = 0; step < AHEAD; step++) spread(step);
    for (int64_t step = 0; step < steps; step++) {
        fetch.step();
        spread(step + AHEAD);
        const uint8_t *pair = tiles + 2 * (step % RING) * TILE;
        _tile_loadd(6, pair, 64);
        _tile_loadd(7, pair + TILE, 64);
        _tile_loadd(4, x.at(0, step), x.row * 2);
        _tile_zero(0);
        _tile_zero(1);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_stored(0, parts[step % RING][0], 64);
        _tile_stored(1, parts[step % RING][1], 64);
        written();
        if (step >= AHEAD) add(step - AHEAD);
    }
    for (int64_t step = std::max<int64_t>(steps - AHEAD, 0); step < steps; step++) add(step);
}

// Up to 32 rows (two tiles of them, from at[0] and at[1]) times 32 outputs; `fresh`: the weight is not in `tiles` yet.
template <class Kind, bool BOTH>
void multiply_block(Columns<const bf16> x, const int64_t *at, const uint8_t *packed, uint8_t *tiles, bool fresh, int64_t steps,
                    Fetch &fetch, float (*sums)[16][OUT]) {
    constexpr bool WHOLE = Kind::BYTES == TILE;
    constexpr int64_t AHEAD = 2;  // steps
    const bf16 *const from[2] = {x.at(at[0], 0), x.at(at[1], 0)};
    const auto spread = [&](int64_t step) {
        if constexpr (!WHOLE)
            if (fresh && step < steps)
                for (int i = 0; i < 2; i++)
                    Kind::spread(packed + (2 * step + i) * Kind::BYTES, (__m512i *)(tiles + (2 * step + i) * TILE));
        written();
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < AHEAD; step++) spread(step);
    for (int64_t step = 0; step < steps; step++) {
        fetch.step();
        spread(step + AHEAD);
        const uint8_t *pair = (WHOLE ? packed : tiles) + 2 * step * TILE;
        _tile_loadd(6, pair, 64);
        _tile_loadd(7, pair + TILE, 64);
        _tile_loadd(4, from[0] + step * x.block, x.row * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (BOTH) {
            _tile_loadd(5, from[1] + step * x.block, x.row * 2);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], OUT * 4);
    _tile_stored(1, sums[0][0] + 16, OUT * 4);
    if constexpr (BOTH) {
        _tile_stored(2, sums[1], OUT * 4);
        _tile_stored(3, sums[1][0] + 16, OUT * 4);
    }
    written();
}

// Rows of a panel that are multiplied with its weights at once.
constexpr int64_t TALL = 32;

// All rows times 32 outputs; `done` with the sums of each.
template <class Kind, class Done>
void multiply_panel(Columns<const bf16> x, const uint8_t *packed, uint8_t *tiles, int64_t rows, int64_t inputs,
                    const float *of_groups, Fetch &fetch, Done &&done) {
    alignas(64) float sums[2][16][OUT];
    if constexpr (Kind::BYTES == Fourths::BYTES)
        if (rows <= SCALED) {
            multiply_few(x, packed, tiles, rows, inputs, of_groups, fetch, sums[0]);
            for (int64_t row = 0; row < rows; row++) done(sums[0][row], row);
            return;
        }
    const int64_t tall = std::min<int64_t>(rows, 16);
    for (int64_t block = 0; block < (rows + 31) / 32; block++) {
        // The last tile ends with the last row, and so may hold some rows a second time.
        const int64_t at[2] = {std::min(32 * block, rows - tall), std::min(32 * block + 16, rows - tall)};
        const bool both = rows - 32 * block > 16;
        auto *kernel = both ? multiply_block<Kind, true> : multiply_block<Kind, false>;
        kernel(x, at, packed, tiles, block == 0, inputs / IN, fetch, sums);
        for (int i = 0; i < (both ? 2 : 1); i++)
            for (int64_t row = 0; row < tall; row++) done(sums[i][row], at[i] + row);
    }
}

// Before and after a team's products; `tall` is the height of its tiles.
inline void configure(int64_t tall) {
    struct alignas(64) Config {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t width[16] = {};
        uint8_t height[16] = {};
    } config;
    for (int i = 0; i < 8; i++) config.width[i] = 64, config.height[i] = i < 6 ? tall : 16;
    written();
    _tile_loadconfig(&config);
}
inline void release() { _tile_release(); }
#else
constexpr int64_t TALL = AT_ONCE;
inline void configure(int64_t) {}
inline void release() {}

// N rows times 32 outputs in int4, sixteen by sixteen: values are multiplied as they are, and each group's sums are scaled.
template <int N>
void dot_fourths(Inputs x, const uint8_t *packed, int64_t steps, const float *of_groups, Fetch &fetch, float (*sums)[OUT]) {
    for (int half = 0; half < 2; half++) {
        Floats total[N] = {};
        for (int64_t step = 0; step < steps; step++) {
            const uint8_t *tile = packed + (2 * step + half) * Fourths::BYTES;
            const bf16 *at = x.at + step * x.step;
            __m512 part[N][2] = {};
            for (int i = 0; i < 8; i++) {
                fetch.step();
                const __m512i bits = Fourths::both(tile, i);
                const Pairs even = pairs(Fourths::whole(bits)), odd = pairs(Fourths::whole(_mm512_srli_epi16(bits, 4)));
#pragma GCC unroll 16
                for (int n = 0; n < N; n++) {
                    part[n][0] = add_products(part[n][0], pairs(both_of(at + n * x.row + 4 * i)), even);
                    part[n][1] = add_products(part[n][1], pairs(both_of(at + n * x.row + 4 * i + 2)), odd);
                }
            }
            const Fourths::Scaling scaling(tile);
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) total[n] += scaling((Floats)part[n][0] + (Floats)part[n][1], of_groups[n * steps + step]);
        }
#pragma GCC unroll 16
        for (int n = 0; n < N; n++) store(total[n], sums[n] + LANES * half);
    }
}

// As `Whole`, tile by tile put into `tiles` before, where the next rows find them: while others are multiplied, at no cost.
template <class Kind>
struct Spreading : Whole {
    const uint8_t *packed;
    uint8_t *tiles;

    Spreading(const uint8_t *packed, uint8_t *tiles) : packed(packed), tiles(tiles) {}
    const uint8_t *open(const uint8_t *tile) const {
        uint8_t *to = tiles + (tile - packed) / Kind::BYTES * TILE;
        Kind::spread(tile, (__m512i *)to);
        return to;
    }
};

template <class Kind, class Done>
void multiply_panel(Columns<const bf16> x, const uint8_t *packed, uint8_t *tiles, int64_t rows, int64_t inputs,
                    const float *of_groups, Fetch &fetch, Done &&done) {
    constexpr int64_t FEWER = 8;
    alignas(64) float sums[AT_ONCE][OUT];
    const Inputs given = {x.data, x.row, x.block};
    const int64_t steps = inputs / IN;
    const auto next = [&] { fetch.step(); };
    if constexpr (Kind::BYTES == Fourths::BYTES)
        if (rows <= SCALED) {
            const int64_t parts = parts_of(rows, FEWER);
            for (int64_t part = 0; part < parts; part++) {
                const int64_t first = rows * part / parts, count = rows * (part + 1) / parts - first;
                auto *kernel = count == 1   ? dot_fourths<1>
                               : count == 2 ? dot_fourths<2>
                               : count == 3 ? dot_fourths<3>
                               : count == 4 ? dot_fourths<4>
                               : count == 5 ? dot_fourths<5>
                               : count == 6 ? dot_fourths<6>
                               : count == 7 ? dot_fourths<7>
                                            : dot_fourths<8>;
                kernel(given.from(first), packed, steps, of_groups + first * steps, fetch, sums);
                for (int64_t row = 0; row < count; row++) done(sums[row], first + row);
            }
            return;
        }
    const int64_t parts = parts_of(rows);
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = rows * part / parts, count = rows * (part + 1) / parts - first;
        const auto by = [&](const auto &kind, Pile pile) {
            dot_part(count, kind, given.from(first), pile, steps, sums[0], OUT, next);
        };
        const Pile kept = {packed, Kind::BYTES, 2 * Kind::BYTES}, whole = {tiles, TILE, 2 * TILE};
        if constexpr (Kind::BYTES == TILE) {
            by(Whole(), kept);
        } else if (part > 0) {
            by(Whole(), whole);
        } else if (Kind::BYTES == Fourths::BYTES || parts > 1) {
            by(Spreading<Kind>(packed, tiles), kept);
        } else if constexpr (Kind::BYTES == Eighths::BYTES) {
            by(Eighths(), kept);
        }
        for (int64_t row = 0; row < count; row++) done(sums[row], first + row);
    }
}
#endif

// To the nearest in bf16, ties to even.
inline Floats nearest(Floats values) {
    const Words bits = (Words)values;
    return (Floats)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

// Sums of a row's 32 outputs, or fewer, scaled and rounded; each thing that is added rounds again, as an operation would.
inline void finish(const float *sums, const float *scales, const bf16 *bias, const bf16 *residual, bf16 *to, int64_t outputs) {
    Floats low = load(sums), high = load(sums + LANES);
    if (scales) low *= load(scales), high *= load(scales + LANES);
    for (const bf16 *more : {bias, residual})
        if (more && outputs == OUT)
            low = nearest(low) + load(more), high = nearest(high) + load(more + LANES);
        else if (more) {
            alignas(64) bf16 added[OUT] = {};
            std::memcpy(added, more, outputs * sizeof(bf16));
            low = nearest(low) + load(added), high = nearest(high) + load(added + LANES);
        }
    const __m512i rounded = pair((__m512)low, (__m512)high);
    if (outputs == OUT)
        std::memcpy(to, &rounded, sizeof(rounded));
    else
        std::memcpy(to, &rounded, outputs * sizeof(bf16));
}

// Called by all threads of a team: x [rows, inputs] -> out [rows, outputs], with `residual` (not `out` itself) added.
template <class Kind>
void multiply_in_team(const Product &product, Columns<const bf16> x, Columns<const bf16> residual, Columns<bf16> out, int64_t rows) {
    const int64_t inputs = product.inputs, outputs = product.outputs, steps = inputs / IN, panels = (outputs + OUT - 1) / OUT;
    if (rows > 1) configure(std::min<int64_t>(rows, 16));
    static thread_local std::vector<uint8_t> space;
    static thread_local std::vector<float> of_groups;  // sums of x
    constexpr bool GROUPS = Kind::BYTES == Fourths::BYTES;
    if (rows > 1 && Kind::BYTES != TILE) space.resize(2 * std::max<int64_t>(steps, 4) * TILE + 64);
    if (rows <= SCALED && GROUPS) {
        of_groups.resize(rows * steps);
        for (int64_t i = 0; i < rows * steps; i++) {
            const bf16 *group = x.at(i / steps, i % steps);
            of_groups[i] = sum_of(load(group) + load(group + LANES));
        }
    }
    uint8_t *tiles = (uint8_t *)(((uintptr_t)space.data() + 63) / 64 * 64);
    const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
    const int64_t begin = panels * me / threads, end = panels * (me + 1) / threads, bytes = steps * 2 * Kind::BYTES;
    for (int64_t panel = begin; panel < end; panel++) {
        const uint8_t *packed = product.tiles + panel * bytes;
        const int64_t first = panel * OUT, wide = std::min<int64_t>(outputs - first, OUT);
        const auto done = [&](const float *row_sums, int64_t row) {
            finish(row_sums, product.scales ? product.scales + first : nullptr, product.bias ? product.bias + first : nullptr,
                   residual.data ? residual.at(row, panel) : nullptr, out.at(row, panel), wide);
        };
        const int64_t blocks = (rows + TALL - 1) / TALL;
        // The first panel comes with the multiplication, the others during the multiplication of the panel before.
        Fetch fetch{panel == begin ? packed : packed + bytes, packed + bytes + (panel + 1 < end ? bytes : 0)};
        if (panel == begin)
            for (fetch.lines = 1; fetch.at < std::min(fetch.end, packed + 8 * Kind::BYTES);) fetch.step();
        fetch.lines = (fetch.end - fetch.at + 64 * blocks * steps * FETCHES - 1) / (64 * blocks * steps * FETCHES);
        if (rows > 1) {
            multiply_panel<Kind>(x, packed, tiles, rows, inputs, of_groups.data(), fetch, done);
            continue;
        }
        alignas(64) float sums[OUT];
        multiply_row<Kind>(x, packed, inputs, of_groups.data(), fetch, sums);
        done(sums, 0);
    }
    if (rows > 1) release();
#pragma omp barrier
}

inline void multiply_in_team(const Product &product, Columns<const bf16> x, Columns<const bf16> residual, Columns<bf16> out,
                             int64_t rows) {
    auto *kernel = product.bits == 16  ? multiply_in_team<Whole>
                   : product.bits == 8 ? multiply_in_team<Eighths>
                                       : multiply_in_team<Fourths>;
    // Every panel of weights goes over all rows: those that it finds in its core's own cache.
    const int64_t most = std::max<int64_t>(NEAR / (product.inputs * int64_t(sizeof(bf16))), 128), parts = (rows + most - 1) / most;
    for (int64_t part = 0; part < parts; part++) {  // alike, but for whole tiles: one row alone would be summed in another order
        const int64_t first = rows * part / parts / 32 * 32, end = part + 1 < parts ? rows * (part + 1) / parts / 32 * 32 : rows;
        kernel(product, x.from(first), residual.from(first), out.from(first), end - first);
    }
}

}  // namespace
