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

        Laid() {}
        void lay(const bf16 *from_keys, const bf16 *from_values, int64_t slots) {
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

    // Up to 32 queries, as two tiles of them; with BOTH false the second is not looked at.
    struct Block {
        alignas(64) bf16 queries[2][16][D], weights[2][16][MOST];
        alignas(64) float scores[2][16][MOST];
        int64_t count;
        Query of[32];

        // Those from `at` on, which is moved on behind them.
        void take(const Attention<bf16> &a, int64_t b, int64_t head, int64_t left, Query &at) {
            count = std::min<int64_t>(left, 32);
            for (int64_t i = 0; i < count; i++, at = a.after(at)) {
                of[i] = at;
                std::memcpy(queries[i / 16][i % 16], a.template query<D>(b, head, at), D * sizeof(bf16));
            }
        }

        // Over a part of the slots: weighted sums to `found` [16 or 32, D]; false where none of them sees anything there.
        bool attend(const Attention<bf16> &a, int64_t b, int64_t first, int64_t slots, const Laid &laid, Share *shares, float *found) {
            int64_t most = 0;
            for (int64_t i = 0; i < count; i++) most = std::max(most, a.seen(b, of[i], first, slots));
            if (most <= 0) return false;  // a prompt's first rows see nothing of its end
            written();
            count > 16 ? multiply_keys<true>(laid, slots) : multiply_keys<false>(laid, slots);
            written();
            for (int64_t i = 0; i < count; i++) {
                bf16 *mine = weights[i / 16][i % 16];
                const bf16 *bias = a.bias_of(b, of[i], first);
                shares[i] = weigh(scores[i / 16][i % 16], a.scale, bias, a.seen(b, of[i], first, slots), slots, mine);
                if ((slots + LANES - 1) / LANES % 2) store(Floats{}, mine + (slots + LANES - 1) / LANES * LANES);
            }
            written();
            count > 16 ? multiply_values<true>(laid, slots, found) : multiply_values<false>(laid, slots, found);
            written();
            return true;
        }

        template <bool BOTH>
        void multiply_keys(const Laid &laid, int64_t slots) {
            for (int64_t s = 0; s < slots; s += 32) {  // the last 16 may be none, and are not read
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int part = 0; part < D / IN; part++) {
                    _tile_loadd(4, queries[0][0] + part * IN, D * sizeof(bf16));
                    _tile_loadd(6, laid.keys[s / 16][part], 64);
                    _tile_loadd(7, laid.keys[s / 16 + 1][part], 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    if constexpr (BOTH) {
                        _tile_loadd(5, queries[1][0] + part * IN, D * sizeof(bf16));
                        _tile_dpbf16ps(2, 5, 6);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
                _tile_stored(0, scores[0][0] + s, MOST * sizeof(float));
                _tile_stored(1, scores[0][0] + s + 16, MOST * sizeof(float));
                if constexpr (BOTH) {
                    _tile_stored(2, scores[1][0] + s, MOST * sizeof(float));
                    _tile_stored(3, scores[1][0] + s + 16, MOST * sizeof(float));
                }
            }
        }

        template <bool BOTH>
        void multiply_values(const Laid &laid, int64_t slots, float *found) {
            for (int part = 0; part < D / 16; part += 2) {
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int64_t s = 0; s < slots; s += IN) {
                    _tile_loadd(4, weights[0][0] + s, MOST * sizeof(bf16));
                    _tile_loadd(6, laid.values[s / IN][part], 64);
                    _tile_loadd(7, laid.values[s / IN][part + 1], 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    if constexpr (BOTH) {
                        _tile_loadd(5, weights[1][0] + s, MOST * sizeof(bf16));
                        _tile_dpbf16ps(2, 5, 6);
                        _tile_dpbf16ps(3, 5, 7);
                    }
                }
                _tile_stored(0, found + part * 16, D * sizeof(float));
                _tile_stored(1, found + part * 16 + 16, D * sizeof(float));
                if constexpr (BOTH) {
                    _tile_stored(2, found + 16 * D + part * 16, D * sizeof(float));
                    _tile_stored(3, found + 16 * D + part * 16 + 16, D * sizeof(float));
                }
            }
        }
    };

    static void configure() {
        struct alignas(64) Config {
            uint8_t palette = 1, start = 0, reserved[14] = {};
            uint16_t width[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t height[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        written();
        _tile_loadconfig(&config);
    }

    static void run(const Attention<bf16> &a, int64_t b, int64_t head, int64_t first, int64_t slots, Share *shares, float *sums) {
        const int64_t at = b * a.key_batch + head * a.key_head + first * D;
        Laid laid;
        laid.lay(a.keys + at, a.values + at, slots);
        Block block;
        alignas(64) float last[32 * D];  // sums of those that do not fill their tiles
        Query query = {0, 0};
        configure();
        for (int64_t start = 0; start < a.count(); start += 32) {
            block.take(a, b, head, a.count() - start, query);
            float *to = sums + start * D, *found = block.count % 16 ? last : to;
            if (!block.attend(a, b, first, slots, laid, shares + start, found)) {
                std::fill_n(shares + start, block.count, Share{-1e30f, 0});
                std::fill_n(to, block.count * D, 0.0f);
            } else if (found != to) {
                std::memcpy(to, found, block.count * D * sizeof(float));
            }
        }
        _tile_release();
    }
};

// The same for a prompt's many queries: each takes one part of the slots after the other and keeps a running sum (FlashAttention,
// Dao et al. 2022), where the parts' own sums would be more to write and read than there is to compute.
template <int D>
void attend_prompt_in_team(const Attention<bf16> &a, Between &between) {
    using Way = ByTiles<D>;
    const int64_t parts = a.parts(Way::MOST), heads = a.batch * a.key_heads, blocks = (a.count() + 31) / 32;
    auto *laid = (typename Way::Laid *)between.laid.get();
#pragma omp for schedule(static)
    for (int64_t task = 0; task < heads * parts; task++) {
        const int64_t head = task / parts, b = head / a.key_heads, part = a.part(b, Way::MOST), first = task % parts * part;
        const int64_t at = b * a.key_batch + head % a.key_heads * a.key_head + first * D, slots = std::min(a.ends[b] - first, part);
        if (slots > 0) laid[task].lay(a.keys + at, a.values + at, slots);
    }
    typename Way::Block block;
    alignas(64) float found[32][D], sums[32][D];
    Share now[32];
    alignas(64) float largest[32], total[32], before[32], here[32];  // of all parts so far; what the sums before and the part's weigh
    Way::configure();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < heads * blocks; task++) {
        const int64_t head = task / blocks % a.key_heads, b = task / blocks / a.key_heads, start = task % blocks * 32;
        const int64_t part = a.part(b, Way::MOST);
        Query query = {start % a.rows, start / a.rows};
        block.take(a, b, head, a.count() - start, query);
        std::fill_n(largest, 32, -1e30f);
        std::memset(total, 0, sizeof(total));
        std::memset(sums, 0, sizeof(sums));
        for (int64_t first = 0; first < a.ends[b]; first += part) {
            const int64_t slots = std::min(a.ends[b] - first, part), number = (b * a.key_heads + head) * parts + first / part;
            if (!block.attend(a, b, first, slots, laid[number], now, found[0])) continue;
            for (int i = 0; i < 32; i++) {
                const float most = i < block.count ? std::max(largest[i], now[i].largest) : 0;
                before[i] = largest[i] - most, here[i] = i < block.count ? now[i].largest - most : 0, largest[i] = most;
            }
            for (int i = 0; i < 32; i += LANES)
                store(exp_negative(load(before + i)), before + i), store(exp_negative(load(here + i)), here + i);
            for (int64_t i = 0; i < block.count; i++) {
                total[i] = total[i] * before[i] + now[i].total * here[i];
                for (int64_t d = 0; d < D; d += LANES)
                    store(load(sums[i] + d) * before[i] + load(found[i] + d) * here[i], sums[i] + d);
            }
        }
        for (int64_t i = 0; i < block.count; i++) {
            const Query &at = block.of[i];
            bf16 *to = a.out + ((b * a.rows + at.row) * a.key_heads * a.groups + head * a.groups + at.group) * D;
            for (int64_t d = 0; d < D; d += LANES) store(load(sums[i] + d) / total[i], to + d);
        }
    }
    _tile_release();
}

constexpr int64_t PROMPT = 256;  // queries of a key head from which on they are a prompt's

inline auto by_tiles(int64_t width, bool prompt) {
    return width == 32   ? prompt ? attend_prompt_in_team<32> : attend_in_team<ByTiles<32>, bf16, 32>
           : width == 64 ? prompt ? attend_prompt_in_team<64> : attend_in_team<ByTiles<64>, bf16, 64>
           : width == 96 ? prompt ? attend_prompt_in_team<96> : attend_in_team<ByTiles<96>, bf16, 96>
                         : prompt ? attend_prompt_in_team<128> : attend_in_team<ByTiles<128>, bf16, 128>;
}

// Room for what it hands between threads.
inline void fit_tiles(const Attention<bf16> &a, int64_t width, bool prompt, Between &between) {
    if (!prompt) return between.fit(a, width, ByTiles<32>::MOST);
    const size_t each = 2 * ByTiles<32>::MOST * width * sizeof(bf16);
    between.fit_laid(a.batch * a.key_heads * a.parts(ByTiles<32>::MOST) * each);
}

}  // namespace
