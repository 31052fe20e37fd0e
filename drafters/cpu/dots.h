// Products of rows with tiles of weights by vectors: what the matrix unit does, on processors that have none.

#pragma once

#include <immintrin.h>

#include "vectors.h"

namespace {

constexpr int IN = 32, OUT = 32, TILE = 1024;  // inputs of a tile, outputs of a pair of them, bytes of one in bf16

// Sixteen pairs of bf16: a row of a tile, or the same two inputs sixteen times.
inline __m512i both_of(const bf16 *two) {
    int32_t bits;
    std::memcpy(&bits, two, sizeof(bits));
    return _mm512_set1_epi32(bits);
}

#ifdef __AVX512BF16__
inline __m512i pair(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
typedef __m512i Pairs;
inline Pairs pairs(__m512i bits) { return bits; }
inline __m512 add_products(__m512 sum, Pairs x, Pairs w) { return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w); }
#else
inline __m512i pair(__m512 low, __m512 high) {
    alignas(64) bf16 both[2 * LANES];
    store((Floats)low, both), store((Floats)high, both + LANES);
    return _mm512_load_si512(both);
}
struct Pairs {
    __m512 even, odd;
};
inline Pairs pairs(__m512i bits) {
    const __m512i odd = _mm512_and_si512(bits, _mm512_set1_epi32(int32_t(0xffff0000u)));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16)), _mm512_castsi512_ps(odd)};
}
inline __m512 add_products(__m512 sum, const Pairs &x, const Pairs &w) {
    return _mm512_fmadd_ps(x.odd, w.odd, _mm512_fmadd_ps(x.even, w.even, sum));
}
#endif

// Rows of inputs: `row` values from one to the next, `step` from 32 inputs to the next 32.
struct Inputs {
    const bf16 *at;
    int64_t row, step;

    Inputs from(int64_t r) const { return {at + r * row, row, step}; }
};

// Pairs of tiles of one kind: `other` bytes from a pair's first to its second, `step` from one pair to the next.
struct Pile {
    const uint8_t *at;
    int64_t other, step;
};

// N rows times the 32 outputs of a pile of tiles -> sums [N, 32], `width` floats from one row to the next. Each sum is taken
// in the order of the inputs, however many rows there are. `each` is called sixteen times in each step.
template <int N, class Kind, class Each>
void dot_rows(const Kind &kind, Inputs x, Pile pile, int64_t steps, float *sums, int64_t width, Each &&each) {
    __m512 total[N][2] = {};
    for (int64_t step = 0; step < steps; step++) {
        const uint8_t *tile = kind.open(pile.at + step * pile.step), *other = kind.open(pile.at + step * pile.step + pile.other);
        const bf16 *at = x.at + step * x.step;
#pragma GCC unroll 2
        for (int i = 0; i < IN / 2; i++) {
            each();
            const Pairs first = pairs(Kind::row(tile, i)), second = pairs(Kind::row(other, i));
#pragma GCC unroll 16
            for (int n = 0; n < N; n++) {
                const Pairs inputs = pairs(both_of(at + n * x.row + 2 * i));
                total[n][0] = add_products(total[n][0], inputs, first);
                total[n][1] = add_products(total[n][1], inputs, second);
            }
        }
    }
#pragma GCC unroll 16
    for (int n = 0; n < N; n++)
        for (int half = 0; half < 2; half++) _mm512_storeu_ps(sums + n * width + LANES * half, total[n][half]);
}

// Any number of rows, as evenly as possible in parts of up to 12, which with their weights fill the registers.
constexpr int64_t AT_ONCE = 12;
inline int64_t parts_of(int64_t rows, int64_t most = AT_ONCE) { return (rows + most - 1) / most; }

template <class Kind, class Each>
void dot_part(int64_t rows, const Kind &kind, Inputs x, Pile pile, int64_t steps, float *sums, int64_t width, Each &&each) {
    switch (rows) {
#define ROWS(N) \
    case N: \
        return dot_rows<N>(kind, x, pile, steps, sums, width, each);
        ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#undef ROWS
    }
}

template <class Kind>
void dot_all(int64_t rows, const Kind &kind, Inputs x, Pile pile, int64_t steps, float *sums, int64_t width) {
    const int64_t parts = parts_of(rows);
    for (int64_t part = 0; part < parts; part++) {
        const int64_t first = rows * part / parts, end = rows * (part + 1) / parts;
        dot_part(end - first, kind, x.from(first), pile, steps, sums + first * width, width, [] {});
    }
}

}  // namespace
