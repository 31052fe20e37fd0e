// What torch's CPU kernels cannot do fast enough for decoding; see cpu_kernels.py, which compiles and calls this.
// Plain C interface, loops that the compiler vectorises, torch's own OpenMP threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

struct bf16 {
    uint16_t bits;
};

// Sixteen values, in whatever registers the machine has (an extension of GCC and clang).
constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

inline Floats load(const float *from) {
    Floats values;
    std::memcpy(&values, from, sizeof(values));
    return values;
}
inline Floats load(const bf16 *from) {
    Halves bits;
    std::memcpy(&bits, from, sizeof(bits));
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}
inline float to_float(float value) { return value; }
inline float to_float(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float whole;
    std::memcpy(&whole, &bits, sizeof(whole));
    return whole;
}
inline void store(Floats values, float *to) { std::memcpy(to, &values, sizeof(values)); }
inline void store(Floats values, bf16 *to) {  // to the nearest, ties to even
    const Words bits = (Words)values;
    const Halves rounded = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
    std::memcpy(to, &rounded, sizeof(rounded));
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// e^x for x <= 0, within 2 ulp; 0 below e^-87, for -inf, too.
inline Floats exp_negative(Floats x) {
    const Floats clamped = larger(x, Floats{} - 87.0f);
    const Ints n = __builtin_convertvector(clamped * 1.44269504f - 0.5f, Ints);  // rounded: it is negative
    const Floats whole = __builtin_convertvector(n, Floats), r = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats p = r * 1.9875691e-4f + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666666e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    return x < -87.0f ? Floats{} : p * (Floats)((n + 127) << 23);
}

// The sums of COUNT vectors: lane i of the first of them holds the sum of vector i % COUNT over 16 / COUNT lanes, and so on.
template <int COUNT>
inline Floats sums_of(const Floats *given) {
    Floats half[COUNT / 2];
    for (int i = 0; i < COUNT / 2; i++) {
        const Floats a = given[i], b = given[i + COUNT / 2];
        constexpr int W = COUNT / 2;
        Ints even, odd;
        for (int lane = 0; lane < LANES; lane++) {
            const int from = lane / COUNT * COUNT + lane % W;
            even[lane] = lane % COUNT < W ? from : LANES + from;
            odd[lane] = even[lane] + W;
        }
        half[i] = __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, odd);
    }
    return sums_of<COUNT / 2>(half);
}
template <>
inline Floats sums_of<1>(const Floats *given) { return *given; }

template <class Combine>
inline float reduce(Floats values, Combine combine) {
    float result = values[0];
    for (int i = 1; i < LANES; i++) result = combine(result, values[i]);
    return result;
}

// ---------------------------------------------------------------------------------------------------------- attention

constexpr int64_t CHUNK = 256;  // cache slots that one thread takes at once: their keys and values fit its L2 cache

// One chunk's share of a query's attention: the sum of e^(score - largest) values, of the weights, and the largest.
struct Share {
    float largest, total;
};

// N queries [N, D] over `slots` keys and values [slots, D]; `bias[n]`: added to the scores of query n, or null.
// A query's `seen[n]` first slots are seen. Weighted sums go to `out` [N, D].
template <class T, int D, int N>
void attend_chunk(const float *queries, const T *keys, const T *values, const T *const *bias, const int64_t *seen,
                  int64_t slots, Share *share, float *out) {
    constexpr int V = D / LANES;
    alignas(64) float weights[N][CHUNK];
    Floats query[N][V];
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) query[n][v] = load(queries + n * D + v * LANES);
    for (int64_t s = 0; s < slots; s += LANES) {
        Floats products[N][LANES];
        for (int i = 0; i < LANES; i++) {
            const T *key = keys + std::min(s + i, slots - 1) * D;
            for (int n = 0; n < N; n++) products[n][i] = Floats{};
            for (int v = 0; v < V; v++) {
                const Floats part = load(key + v * LANES);
                for (int n = 0; n < N; n++) products[n][i] += query[n][v] * part;
            }
        }
        for (int n = 0; n < N; n++) store(sums_of<LANES>(products[n]), weights[n] + s);
    }
    const int64_t padded = (slots + LANES - 1) / LANES * LANES;
    for (int n = 0; n < N; n++) {
        const int64_t some = std::clamp<int64_t>(seen[n], 0, slots);
        for (int64_t s = some; s < padded; s++) weights[n][s] = -INFINITY;
        if (bias[n])
            for (int64_t s = 0; s < some; s++) weights[n][s] += to_float(bias[n][s]);
        Floats most = Floats{} - 1e30f, total = {};  // finite, so that no -inf is taken from -inf
        for (int64_t s = 0; s < padded; s += LANES) most = larger(most, load(weights[n] + s));
        const float largest = reduce(most, [](float a, float b) { return std::max(a, b); });
        for (int64_t s = 0; s < padded; s += LANES) {
            const Floats weight = exp_negative(load(weights[n] + s) - largest);
            store(weight, weights[n] + s);
            total += weight;
        }
        share[n] = {largest, reduce(total, [](float a, float b) { return a + b; })};
    }
    Floats sums[N][V] = {};
    for (int64_t s = 0; s < slots; s++)
        for (int v = 0; v < V; v++) {
            const Floats part = load(values + s * D + v * LANES);
            for (int n = 0; n < N; n++) sums[n][v] += weights[n][s] * part;
        }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(sums[n][v], out + n * D + v * LANES);
}

template <class T, int D>
void attend(const T *queries, const T *keys, const T *values, const T *bias, const int64_t *ends, T *out,
            int64_t batch, int64_t rows, int64_t key_heads, int64_t groups, int64_t query_batch, int64_t query_row,
            int64_t key_batch, int64_t key_head, int64_t bias_batch, int64_t bias_row, float scale, int threads) {
    const int64_t count = rows * groups, longest = *std::max_element(ends, ends + batch);
    const int64_t chunks = (longest + CHUNK - 1) / CHUNK, tasks = batch * key_heads * chunks;
    static thread_local std::vector<float> sums;
    static thread_local std::vector<Share> shares;
    sums.resize(tasks * count * D);
    shares.resize(tasks * count);
    float *all_sums = sums.data();
    Share *all_shares = shares.data();
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; task++) {
            const int64_t chunk = task % chunks, head = task / chunks % key_heads, b = task / chunks / key_heads;
            const int64_t first = chunk * CHUNK, slots = std::min(ends[b] - first, CHUNK);
            if (slots <= 0) continue;
            const int64_t at = b * key_batch + head * key_head + first * D;
            for (int64_t start = 0; start < count; start += 4) {
                const int64_t some = std::min<int64_t>(count - start, 4);
                alignas(64) float scaled[4 * D];
                const T *row_bias[4];
                int64_t seen[4];
                for (int64_t n = 0; n < some; n++) {  // number n of a head: row n % rows of its query head n / rows
                    const int64_t row = (start + n) % rows, group = (start + n) / rows;
                    const T *query = queries + b * query_batch + row * query_row + (head * groups + group) * D;
                    for (int d = 0; d < D; d++) scaled[n * D + d] = to_float(query[d]) * scale;
                    row_bias[n] = bias ? bias + b * bias_batch + row * bias_row + first : nullptr;
                    seen[n] = bias ? slots : ends[b] - rows + row + 1 - first;
                }
                float *to = all_sums + (task * count + start) * D;
                Share *share = all_shares + task * count + start;
                auto *kernel = some == 1   ? attend_chunk<T, D, 1>
                               : some == 2 ? attend_chunk<T, D, 2>
                               : some == 3 ? attend_chunk<T, D, 3>
                                           : attend_chunk<T, D, 4>;
                kernel(scaled, keys + at, values + at, row_bias, seen, slots, share, to);
            }
        }
#pragma omp for schedule(static)
        for (int64_t query = 0; query < batch * key_heads * count; query++) {
            const int64_t n = query % count, head = query / count % key_heads, b = query / count / key_heads;
            const int64_t task = (b * key_heads + head) * chunks, used = (ends[b] + CHUNK - 1) / CHUNK;
            float largest = -1e30f, total = 0;
            Floats sum[D / LANES] = {};
            for (int64_t c = 0; c < used; c++)
                largest = std::max(largest, all_shares[(task + c) * count + n].largest);
            for (int64_t c = 0; c < used; c++) {
                const Share &share = all_shares[(task + c) * count + n];
                const float weight = std::exp(share.largest - largest);
                total += weight * share.total;
                const float *from = all_sums + ((task + c) * count + n) * D;
                for (int v = 0; v < D / LANES; v++) sum[v] += weight * load(from + v * LANES);
            }
            T *to = out + ((b * rows + n % rows) * key_heads * groups + head * groups + n / rows) * D;
            for (int v = 0; v < D / LANES; v++) store(sum[v] / total, to + v * LANES);
        }
    }
}

}  // namespace

// Attention of `rows` new rows (queries [batch, rows, key_heads * groups, D]) over a cache [batch, key_heads, slots, D];
// `ends[b]`: slots of batch row b that are in use, of which the new rows are the last. `bias` [batch or 1, 1, rows, slots]
// or null: each new row sees the slots up to its own. Strides are in values. Gives [batch, rows, key_heads * groups, D].
#define ATTEND(NAME, T)                                                                                               \
    extern "C" void NAME(const T *queries, const T *keys, const T *values, const T *bias, const int64_t *ends, T *out, \
                         int64_t batch, int64_t rows, int64_t key_heads, int64_t groups, int64_t width,                \
                         int64_t query_batch, int64_t query_row, int64_t key_batch, int64_t key_head,                  \
                         int64_t bias_batch, int64_t bias_row, float scale, int threads) {                             \
        auto *kernel = width == 16   ? attend<T, 16>                                                                   \
                       : width == 32 ? attend<T, 32>                                                                   \
                       : width == 64 ? attend<T, 64>                                                                   \
                       : width == 96 ? attend<T, 96>                                                                   \
                                     : attend<T, 128>;                                                                 \
        kernel(queries, keys, values, bias, ends, out, batch, rows, key_heads, groups, query_batch, query_row,         \
               key_batch, key_head, bias_batch, bias_row, scale, threads);                                             \
    }
ATTEND(attend_float32, float)
ATTEND(attend_bfloat16, bf16)

// ----------------------------------------------------------------------------------------------------------- products

#ifdef __AMX_BF16__
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// A weight [outputs, inputs] is kept as tiles of 16 outputs and 32 inputs: [outputs / 32][inputs / 32][2] of them, each in
// the order [input / 2][output][input % 2] that the matrix unit wants. `spread` makes bf16 of a tile that is kept smaller.
constexpr int IN = 32, OUT = 32, TILE = 1024;  // inputs of a tile, outputs of a pair of them, bytes of one in bf16

inline __m512bh pair(__m512 low, __m512 high) { return _mm512_cvtne2ps_pbh(high, low); }
inline __m512bh words(__m512i bits) { return (__m512bh)bits; }

// Each kind of weight: bytes of a tile, and what is in row i of its 16. A row is for inputs 2i and 2i + 1.
struct Whole {  // bf16 as it is
    static constexpr int BYTES = TILE;
    static __m512bh row(const uint8_t *tile, int i) { return words(_mm512_loadu_si512(tile + 64 * i)); }
};

struct Eighths {  // int8, exact in bf16: the scale of each output is for the sums
    static constexpr int BYTES = 512;
    static __m512bh row(const uint8_t *tile, int i) {
        const auto *bytes = (const __m128i *)tile + 2 * i;
        return pair(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes[0])), _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes[1])));
    }
    static void spread(const uint8_t *tile, __m512bh *to) {
        for (int i = 0; i < 16; i++) to[i] = row(tile, i);
    }
};

struct Fourths {  // 16 scales and 16 middles (of value 8), then int4: a byte holds a value of an even row and of the next
    static constexpr int BYTES = 320;
    static __m512i both(const uint8_t *tile, int i) {  // rows 2i and 2i + 1
        return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)(tile + 64 + 32 * i)));
    }
    // The values and 128, which share an exponent in bf16, so that their bits are the last of the mantissa.
    static __m512bh row(const uint8_t *tile, int i) {
        const __m512i bits = i % 2 ? _mm512_srli_epi16(both(tile, i / 2), 4) : both(tile, i / 2);
        const __m512i mask = _mm512_set1_epi16(15), exponent = _mm512_set1_epi16(0x4300);
        return words(_mm512_ternarylogic_epi32(bits, mask, exponent, 0xea));  // bits & mask | exponent
    }
    static void spread(const uint8_t *tile, __m512bh *to) {
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

// One row times 32 outputs, by products of vectors: nothing that is kept smaller has to be written out first.
template <class Kind>
void multiply_row(const bf16 *x, const uint8_t *packed, int64_t inputs, const float *of_groups, float *sums) {
    Floats total[2] = {};
    for (int64_t step = 0; step < inputs / IN; step++)
        for (int half = 0; half < 2; half++) {
            const uint8_t *tile = packed + (2 * step + half) * Kind::BYTES;
            __m512 part[2] = {};
            for (int i = 0; i < 16; i++) {
                int32_t both;  // inputs 2i and 2i + 1
                std::memcpy(&both, x + step * IN + 2 * i, sizeof(both));
                part[i % 2] = _mm512_dpbf16_ps(part[i % 2], words(_mm512_set1_epi32(both)), Kind::row(tile, i));
            }
            const Floats sum = (Floats)part[0] + (Floats)part[1];
            if constexpr (Kind::BYTES == Fourths::BYTES) {
                const Floats scale = load((const bf16 *)tile), middle = load((const bf16 *)tile + 16);
                total[half] += scale * sum + (middle - 136.0f * scale) * of_groups[step];
            } else
                total[half] += sum;
        }
    for (int half = 0; half < 2; half++) store(total[half], sums + 16 * half);
}

// Up to 32 rows (two tiles of them, from x[0] and x[1]) times 32 outputs; `spread_too`: the weight is not in `tiles` yet.
template <class Kind, bool BOTH>
void multiply_block(const bf16 *const *x, const uint8_t *packed, uint8_t *tiles, bool spread_too, int64_t inputs,
                    const uint8_t *next, int64_t next_bytes, float (*sums)[16][OUT]) {
    constexpr bool WHOLE = Kind::BYTES == TILE;
    constexpr int64_t AHEAD = 2;
    const int64_t steps = inputs / IN;
    const auto spread = [&](int64_t step) {
        if constexpr (!WHOLE)
            if (spread_too && step < steps)
                for (int i = 0; i < 2; i++)
                    Kind::spread(packed + (2 * step + i) * Kind::BYTES, (__m512bh *)(tiles + (2 * step + i) * TILE));
    };
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < AHEAD; step++) spread(step);
    for (int64_t step = 0; step < steps; step++) {
        for (int64_t byte = 0; byte < next_bytes; byte += 64) _mm_prefetch(next + step * next_bytes + byte, _MM_HINT_T1);
        spread(step + AHEAD);
        const uint8_t *pair = (WHOLE ? packed : tiles) + 2 * step * TILE;
        _tile_loadd(6, pair, 64);
        _tile_loadd(7, pair + TILE, 64);
        _tile_loadd(4, x[0] + step * IN, inputs * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if constexpr (BOTH) {
            _tile_loadd(5, x[1] + step * IN, inputs * 2);
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
}

// Sums of a row's 32 outputs, scaled and rounded.
inline void finish(const float *sums, const float *scales, bf16 *to, int64_t outputs) {
    Floats low = load(sums), high = load(sums + LANES);
    if (scales) low *= load(scales), high *= load(scales + LANES);
    const __m512bh rounded = pair((__m512)low, (__m512)high);
    if (outputs == OUT)
        std::memcpy(to, &rounded, sizeof(rounded));
    else
        std::memcpy(to, &rounded, outputs * sizeof(bf16));
}

template <class Kind>
void multiply(const bf16 *x, const uint8_t *weight, const float *scales, bf16 *out, int64_t rows, int64_t inputs,
              int64_t outputs, int threads) {
    struct alignas(64) Config {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t width[16] = {};
        uint8_t height[16] = {};
    } config;
    const int64_t steps = inputs / IN, panels = (outputs + OUT - 1) / OUT, tall = std::min<int64_t>(rows, 16);
    for (int i = 0; i < 8; i++) config.width[i] = 64, config.height[i] = i < 6 ? tall : 16;
    std::vector<float> of_groups(rows == 1 ? steps : 0);  // sums of x
    for (int64_t i = 0; i < int64_t(of_groups.size()); i++) {
        const Floats sum = load(x + i * IN) + load(x + i * IN + LANES);
        of_groups[i] = reduce(sum, [](float a, float b) { return a + b; });
    }
#pragma omp parallel num_threads(threads)
    {
        if (rows > 1) _tile_loadconfig(&config);
        static thread_local std::vector<uint8_t> space;
        if (rows > 1 && Kind::BYTES != TILE) space.resize(2 * steps * TILE + 64);
        uint8_t *tiles = (uint8_t *)(((uintptr_t)space.data() + 63) / 64 * 64);
        alignas(64) float sums[2][16][OUT];
#pragma omp for schedule(static)
        for (int64_t panel = 0; panel < panels; panel++) {
            const uint8_t *packed = weight + panel * steps * 2 * Kind::BYTES;
            const int64_t wide = std::min<int64_t>(outputs - panel * OUT, OUT);
            const float *scale = scales ? scales + panel * OUT : nullptr;
            bf16 *to = out + panel * OUT;
            if (rows == 1) {
                multiply_row<Kind>(x, packed, inputs, of_groups.data(), sums[0][0]);
                finish(sums[0][0], scale, to, wide);
                continue;
            }
            const int64_t blocks = (rows + 31) / 32, share = (2 * Kind::BYTES / blocks + 63) / 64 * 64;
            for (int64_t first = 0; first < rows; first += 32) {
                // The last tile ends with the last row, and so may hold some rows a second time.
                const int64_t at[2] = {std::min(first, rows - tall), std::min(first + 16, rows - tall)};
                const bf16 *const from[2] = {x + at[0] * inputs, x + at[1] * inputs};
                const bool both = rows - first > 16;
                auto *block = both ? multiply_block<Kind, true> : multiply_block<Kind, false>;
                const uint8_t *next = packed + steps * (2 * Kind::BYTES + first / 32 * share);
                block(from, packed, tiles, first == 0, inputs, next, share, sums);
                for (int64_t i = 0; i < (both ? 2 : 1) * tall; i++)
                    finish(sums[i / tall][i % tall], scale, to + (at[i / tall] + i % tall) * outputs, wide);
            }
        }
        if (rows > 1) _tile_release();
    }
}

}  // namespace

// Whether the system lets this process use the matrix unit.
extern "C" int products_allowed() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

// x [rows, inputs] times a weight in tiles -> [rows, outputs], in bf16; `scales` [outputs, padded to 32] or null.
extern "C" void multiply(const bf16 *x, const uint8_t *weight, const float *scales, bf16 *out, int64_t rows,
                         int64_t inputs, int64_t outputs, int bits, int threads) {
    auto *kernel = bits == 16 ? multiply<Whole> : bits == 8 ? multiply<Eighths> : multiply<Fourths>;
    kernel(x, weight, scales, out, rows, inputs, outputs, threads);
}
#endif
