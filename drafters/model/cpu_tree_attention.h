// Attention of many new rows in bf16, of a tree or a batch's chains, with the matrix unit.

#pragma once

#include "cpu_attention.h"
#include "cpu_products.h"

namespace {

// 16 x 16 words: row i of `to` is column i of `from`.
inline void transpose(const __m512i *from, __m512i *to) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32(from[i], from[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32(from[i], from[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
        }
    for (int j = 0; j < 4; j++) {  // b[4 g + j]: of rows 4 g to 4 g + 3 the columns j, 4 + j, 8 + j, 12 + j
        const __m512i low = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), high = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
        const __m512i low2 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd), high2 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
        to[j] = _mm512_shuffle_i32x4(low, high, 0x88);
        to[8 + j] = _mm512_shuffle_i32x4(low, high, 0xdd);
        to[4 + j] = _mm512_shuffle_i32x4(low2, high2, 0x88);
        to[12 + j] = _mm512_shuffle_i32x4(low2, high2, 0xdd);
    }
}

// All queries of a key head over a part of its slots, sixteen by sixteen; weights are rounded to bf16 before the values.
template <int D>
struct ByTiles {
    static constexpr int64_t MOST = 128;
    static constexpr int WORDS = D / 2;  // of two values each

    // Keys as tiles [slots / 16][D / 32] of [pair of values][slot]; values as [slots / 32][D / 16] of [pair of slots][value].
    struct Laid {
        alignas(64) __m512i keys[MOST / 16][D / IN][16], values[MOST / IN][D / 16][16];

        Laid(const bf16 *from_keys, const bf16 *from_values, int64_t slots) {
            for (int64_t s = 0; s < slots; s += 16)
                for (int part = 0; part < D / IN; part++) {
                    __m512i rows[16];
                    for (int i = 0; i < 16; i++)  // a slot beyond the last is not seen, but must be readable
                        rows[i] = _mm512_loadu_si512(from_keys + std::min(s + i, slots - 1) * D + part * IN);
                    transpose(rows, keys[s / 16][part]);
                }
            const __m512i zero = _mm512_setzero_si512();
            const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const __m512i first = (__m512i)((lanes + 32) << 16 | lanes), second = (__m512i)((lanes + 48) << 16 | (lanes + 16));
            for (int64_t s = 0; s < (slots + IN - 1) / IN * IN; s += 2)
                for (int part = 0; part < D / IN; part++) {  // beyond the last there may be anything: 0 times nan is nan
                    const bf16 *at = from_values + s * D + part * IN;
                    const __m512i even = s < slots ? _mm512_loadu_si512(at) : zero;
                    const __m512i odd = s + 1 < slots ? _mm512_loadu_si512(at + D) : zero;
                    values[s / IN][2 * part][s % IN / 2] = _mm512_permutex2var_epi16(even, first, odd);
                    values[s / IN][2 * part + 1][s % IN / 2] = _mm512_permutex2var_epi16(even, second, odd);
                }
        }
    };

    static void run(const Attention<bf16> &a, int64_t b, int64_t head, int64_t first, int64_t slots, Share *shares, float *sums) {
        struct alignas(64) Config {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t width[16] = {64, 64, 64};
            uint8_t height[16] = {16, 16, 16};
        } config;
        const int64_t at = b * a.key_batch + head * a.key_head + first * D, padded = (slots + IN - 1) / IN * IN;
        const Laid laid(a.keys + at, a.values + at, slots);
        alignas(64) bf16 queries[16][D] = {}, weights[16][MOST];
        alignas(64) float scores[16][MOST], found[16][D];
        written();
        _tile_loadconfig(&config);
        for (int64_t start = 0; start < a.count(); start += 16) {
            const int64_t some = std::min<int64_t>(a.count() - start, 16);
            for (int64_t i = 0; i < some; i++)
                std::memcpy(queries[i], a.template query<D>(b, head, start + i), D * sizeof(bf16));
            written();
            for (int64_t s = 0; s < slots; s += 16) {
                _tile_zero(0);
                for (int part = 0; part < D / IN; part++) {
                    _tile_loadd(1, queries[0] + part * IN, D * sizeof(bf16));
                    _tile_loadd(2, laid.keys[s / 16][part], 64);
                    _tile_dpbf16ps(0, 1, 2);
                }
                _tile_stored(0, scores[0] + s, MOST * sizeof(float));
            }
            for (int64_t i = 0; i < some; i++) {
                for (int64_t s = 0; s < slots; s += LANES) store(load(scores[i] + s) * a.scale, scores[i] + s);
                const int64_t n = start + i;
                shares[n] = weigh(scores[i], a.bias_of(b, n, first), a.seen(b, n, first, slots), slots);
                for (int64_t s = 0; s < slots; s += LANES) store(load(scores[i] + s), weights[i] + s);
                if ((slots + LANES - 1) / LANES % 2) store(Floats{}, weights[i] + padded - LANES);
            }
            written();
            for (int part = 0; part < D / 16; part++) {
                _tile_zero(0);
                for (int64_t s = 0; s < slots; s += IN) {
                    _tile_loadd(1, weights[0] + s, MOST * sizeof(bf16));
                    _tile_loadd(2, laid.values[s / IN][part], 64);
                    _tile_dpbf16ps(0, 1, 2);
                }
                _tile_stored(0, found[0] + part * 16, D * sizeof(float));
            }
            std::memcpy(sums + start * D, found, some * D * sizeof(float));
        }
        _tile_release();
    }
};

inline auto by_tiles(int64_t width) {
    return width == 32   ? attend_in_team<ByTiles<32>, bf16, 32>
           : width == 64 ? attend_in_team<ByTiles<64>, bf16, 64>
           : width == 96 ? attend_in_team<ByTiles<96>, bf16, 96>
                         : attend_in_team<ByTiles<128>, bf16, 128>;
}

}  // namespace
