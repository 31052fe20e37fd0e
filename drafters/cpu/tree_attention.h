// Attention of many new rows in bf16, of a tree or a batch's chains, by products of tiles.

#pragma once

#include "attention.h"
#include "products.h"

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

// 2^x for x <= 0, within 2^-17, far less than its rounding to bf16 takes; 0 below 2^-126, for -inf, too; NaN stays NaN.
inline __m512 power_of_two(__m512 x) {
    const __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(9.61812911e-3f);  // Taylor's, of r ln 2: |r| is at most a half
    for (const float c : {5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.0f}) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(c));
    return _mm512_maskz_scalef_ps(seen, p, n);
}

// As `weigh`, of at most 16 COUNT slots, all of them in registers; weights are bf16, and 0 behind the last slot.
template <int COUNT>
Share weigh_in_bf16(const float *scores, float scale, const bf16 *bias, int64_t seen, int64_t slots, bf16 *weights) {
    constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;
    const int64_t some = std::clamp<int64_t>(seen, 0, slots);
    const __m512 by = _mm512_set1_ps(scale * LOG2_E), log2_e = _mm512_set1_ps(LOG2_E), unseen = _mm512_set1_ps(-INFINITY);
    __m512 score[COUNT], most = _mm512_set1_ps(-1e30f), total = _mm512_setzero_ps();  // finite: no -inf is taken from -inf
#pragma GCC unroll 16
    for (int64_t i = 0; i < COUNT; i++) {
        const int64_t left = some - i * LANES;
        const __mmask16 mask = left >= LANES ? 0xffff : left > 0 ? (1 << left) - 1 : 0;
        __m512 x = _mm512_mul_ps(_mm512_loadu_ps(scores + i * LANES), by);
        if (bias) {
            const __m256i bits = _mm256_maskz_loadu_epi16(mask, bias + i * LANES);
            x = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16)), log2_e, x);
        }
        score[i] = _mm512_mask_mov_ps(unseen, mask, x);
        most = _mm512_max_ps(most, score[i]);
    }
    const float largest = _mm512_reduce_max_ps(most);
#pragma GCC unroll 16
    for (int64_t i = 0; i < COUNT; i++) {
        const __m512 weight = power_of_two(_mm512_sub_ps(score[i], _mm512_set1_ps(largest)));
        store((Floats)weight, weights + i * LANES);
        total = _mm512_add_ps(total, weight);
    }
    return {largest * LN_2, _mm512_reduce_add_ps(total)};
}

// All queries of a key head over a part of its slots, sixteen by sixteen; weights are rounded to bf16 before the values.
template <int D>
struct ByTiles {
    static constexpr int64_t MOST = 128;  // slots at once
    static constexpr int WORDS = D / 2;   // of two values each

    // Of a task: an eighth of a long row's, since what tasks find has to be put together.
    static int64_t most(int64_t slots) { return std::max(MOST, (slots + 7) / 8); }
    struct Prompt {
        static int64_t most(int64_t) { return MOST; }
    };

    // Keys as tiles [slots / 16][D / 32] of [pair of values][slot]; values as [slots / 32][D / 16] of [pair of slots][value].
    struct Laid {
        alignas(64) __m512i keys[MOST / 16][D / IN][16], values[MOST / IN][D / 16][16];

        Laid() {}
        void lay(const bf16 *from_keys, const bf16 *from_values, int64_t slots) {
            for (int64_t s = 0; s < slots; s += 16) {
                fetch(from_values + s * D, 16 * D);
                for (int part = 0; part < D / IN; part++) {
                    __m512i rows[16];
                    for (int i = 0; i < 16; i++)  // a slot beyond the last is not seen, but must be readable
                        rows[i] = _mm512_loadu_si512(from_keys + std::min(s + i, slots - 1) * D + part * IN);
                    transpose(rows, keys[s / 16][part]);
                }
            }
            const __m512i zero = _mm512_setzero_si512();
            const Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
            const __m512i first = (__m512i)((lanes + 32) << 16 | lanes), second = (__m512i)((lanes + 48) << 16 | (lanes + 16));
            for (int64_t s = 0; s < (slots + IN - 1) / IN * IN; s += 2) {
                fetch(from_keys + (slots + s) * D, 2 * D);  // of the slots that follow
                for (int part = 0; part < D / IN; part++) {  // beyond the last there may be anything: 0 times nan is nan
                    const bf16 *at = from_values + s * D + part * IN;
                    const __m512i even = s < slots ? _mm512_loadu_si512(at) : zero;
                    const __m512i odd = s + 1 < slots ? _mm512_loadu_si512(at + D) : zero;
                    values[s / IN][2 * part][s % IN / 2] = _mm512_permutex2var_epi16(even, first, odd);
                    values[s / IN][2 * part + 1][s % IN / 2] = _mm512_permutex2var_epi16(even, second, odd);
                }
            }
        }
    };

    // Up to 32 queries, as two tiles of them, and what they have found so far: a running sum (FlashAttention, Dao et al.
    // 2022), so that the parts' own sums need not be kept.
    struct Block {
        alignas(64) bf16 queries[2][16][D];
        alignas(64) float sums[32][D], largest[32], total[32];
        int64_t count;
        Query of[32];

        // Those from `at` on, which is moved on behind them.
        void take(const Attention<bf16> &a, int64_t b, int64_t head, int64_t left, Query &at) {
            count = std::min<int64_t>(left, 32);
            for (int64_t i = 0; i < count; i++, at = a.after(at)) {
                of[i] = at;
                std::memcpy(queries[i / 16][i % 16], a.template query<D>(b, head, at), D * sizeof(bf16));
            }
            std::fill_n(largest, 32, -1e30f);
            std::memset(total, 0, sizeof(total));
            std::memset(sums, 0, sizeof(sums));
        }

        void add(const Share *now, const float (*found)[D]) {
            alignas(64) float before[32], here[32];  // what the sums before and the part's weigh
            for (int i = 0; i < 32; i++) {
                const float most = i < count ? std::max(largest[i], now[i].largest) : 0;
                before[i] = largest[i] - most, here[i] = i < count ? now[i].largest - most : 0, largest[i] = most;
            }
            for (int i = 0; i < 32; i += LANES)
                store(exp_negative(load(before + i)), before + i), store(exp_negative(load(here + i)), here + i);
            for (int64_t i = 0; i < count; i++) {
                total[i] = total[i] * before[i] + now[i].total * here[i];
                for (int64_t d = 0; d < D; d += LANES)
                    store(load(sums[i] + d) * before[i] + load(found[i] + d) * here[i], sums[i] + d);
            }
        }
    };

    // What a block's attention over a part of the slots takes; with BOTH false its second tile is not looked at.
    struct Work {
        alignas(64) bf16 weights[2][16][MOST];
        alignas(64) float scores[2][16][MOST], found[32][D];
        Share now[32];

        void attend(const Attention<bf16> &a, int64_t b, int64_t first, int64_t slots, const Laid &laid, Block &block) {
            int64_t most = 0;
            for (int64_t i = 0; i < block.count; i++) most = std::max(most, a.seen(b, block.of[i], first, slots));
            if (most <= 0) return;  // a prompt's first rows see nothing of its end
            const bf16 *queries = block.queries[0][0];
            written();
            block.count > 16 ? multiply_keys<true>(queries, laid, slots, block.count)
                             : multiply_keys<false>(queries, laid, slots, block.count);
            written();
            for (int64_t i = 0; i < block.count; i++) {
                const Query &at = block.of[i];
                now[i] = weigh_in_bf16<MOST / LANES>(scores[i / 16][i % 16], a.scale, a.bias_of(b, at, first),
                                                     a.seen(b, at, first, slots), slots, weights[i / 16][i % 16]);
            }
            written();
            block.count > 16 ? multiply_values<true>(laid, slots, block.count) : multiply_values<false>(laid, slots, block.count);
            written();
            block.add(now, found);
        }

#ifdef __AMX_BF16__
        template <bool BOTH>
        void multiply_keys(const bf16 *queries, const Laid &laid, int64_t slots, int64_t) {
            for (int64_t s = 0; s < slots; s += 32) {  // the last 16 may be none, and are not read
                _tile_zero(0);
                _tile_zero(1);
                _tile_zero(2);
                _tile_zero(3);
                for (int part = 0; part < D / IN; part++) {
                    _tile_loadd(4, queries + part * IN, D * sizeof(bf16));
                    _tile_loadd(6, laid.keys[s / 16][part], 64);
                    _tile_loadd(7, laid.keys[s / 16 + 1][part], 64);
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    if constexpr (BOTH) {
                        _tile_loadd(5, queries + 16 * D + part * IN, D * sizeof(bf16));
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
        void multiply_values(const Laid &laid, int64_t slots, int64_t) {
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
                _tile_stored(0, found[0] + part * 16, D * sizeof(float));
                _tile_stored(1, found[0] + part * 16 + 16, D * sizeof(float));
                if constexpr (BOTH) {
                    _tile_stored(2, found[16] + part * 16, D * sizeof(float));
                    _tile_stored(3, found[16] + part * 16 + 16, D * sizeof(float));
                }
            }
        }
#else
        // Whole pairs of tiles: of the last, some slots and weights may be none, which are not read, and 0.
        template <bool>
        void multiply_keys(const bf16 *queries, const Laid &laid, int64_t slots, int64_t count) {
            constexpr int64_t NEXT = sizeof(laid.keys[0]);
            for (int64_t s = 0; s < slots; s += 32)
                dot_all(count, Whole(), {queries, D, IN}, {(const uint8_t *)laid.keys[s / 16], NEXT, TILE}, D / IN,
                               scores[0][0] + s, MOST);
        }

        template <bool>
        void multiply_values(const Laid &laid, int64_t slots, int64_t count) {
            constexpr int64_t NEXT = sizeof(laid.values[0]);
            for (int part = 0; part < D / 16; part += 2)
                dot_all(count, Whole(), {weights[0][0], MOST, IN}, {(const uint8_t *)laid.values[0][part], TILE, NEXT},
                               (slots + IN - 1) / IN, found[0] + part * 16, D);
        }
#endif
    };

    static void run(const Attention<bf16> &a, int64_t b, int64_t head, int64_t first, int64_t slots, Share *shares, float *sums) {
        static thread_local std::vector<Block> blocks;
        static thread_local Laid laid;
        static thread_local Work work;
        if (int64_t(blocks.size()) * 32 < a.count()) blocks.resize((a.count() + 31) / 32);
        Query query = {0, 0};
        for (int64_t start = 0; start < a.count(); start += 32) blocks[start / 32].take(a, b, head, a.count() - start, query);
        configure(16);
        for (int64_t end = first + slots; first < end; first += MOST) {
            const int64_t at = b * a.key_batch + head * a.key_head + first * D, some = std::min(end - first, MOST);
            laid.lay(a.keys + at, a.values + at, some);
            for (int64_t start = 0; start < a.count(); start += 32) work.attend(a, b, first, some, laid, blocks[start / 32]);
        }
        release();
        for (int64_t i = 0; i < a.count(); i++) {
            const Block &block = blocks[i / 32];
            shares[i] = {block.largest[i % 32], block.total[i % 32]};
            std::memcpy(sums + i * D, block.sums[i % 32], D * sizeof(float));
        }
    }
};

// The same for the many queries of a prompt; each block of queries goes over all slots.
template <int D>
void attend_prompt_in_team(const Attention<bf16> &a, Between &between) {
    using Way = ByTiles<D>;
    const int64_t parts = a.parts<typename Way::Prompt>(), heads = a.batch * a.key_heads, blocks = (a.count() + 31) / 32;
    auto *laid = (typename Way::Laid *)between.laid.get();
#pragma omp for schedule(static)
    for (int64_t task = 0; task < heads * parts; task++) {
        const int64_t head = task / parts, b = head / a.key_heads, part = a.part<typename Way::Prompt>(b), first = task % parts * part;
        const int64_t at = b * a.key_batch + head % a.key_heads * a.key_head + first * D, slots = std::min(a.ends[b] - first, part);
        if (slots > 0) laid[task].lay(a.keys + at, a.values + at, slots);
    }
    static thread_local typename Way::Block block;
    static thread_local typename Way::Work work;
    configure(16);
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < heads * blocks; task++) {
        const int64_t head = task / blocks % a.key_heads, b = task / blocks / a.key_heads, start = task % blocks * 32;
        const int64_t part = a.part<typename Way::Prompt>(b);
        Query query = {start % a.rows, start / a.rows};
        block.take(a, b, head, a.count() - start, query);
        for (int64_t first = 0; first < a.ends[b]; first += part) {
            const int64_t slots = std::min(a.ends[b] - first, part), number = (b * a.key_heads + head) * parts + first / part;
            work.attend(a, b, first, slots, laid[number], block);
        }
        for (int64_t i = 0; i < block.count; i++) {
            const Query &at = block.of[i];
            bf16 *to = a.out + ((b * a.rows + at.row) * a.key_heads * a.groups + head * a.groups + at.group) * D;
            for (int64_t d = 0; d < D; d += LANES) store(load(block.sums[i] + d) / block.total[i], to + d);
        }
    }
    release();
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
    if (!prompt) return between.fit<ByTiles<32>>(a, width);
    const size_t each = 2 * ByTiles<32>::MOST * width * sizeof(bf16);
    between.fit_laid(a.batch * a.key_heads * a.parts<ByTiles<32>::Prompt>() * each);
}

}  // namespace
