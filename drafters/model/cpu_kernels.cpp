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
