// Attention of a few new rows over a cache, each batch row over its own slots alone.

#pragma once

#include <cstdlib>
#include <memory>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int64_t CHUNK = 256;  // cache slots that one thread takes at once: their keys and values fit its L2 cache

// One chunk's share of a query's attention: the sum of e^(score - largest) values, of the weights, and the largest.
struct Share {
    float largest, total;
};

// A query's scores over `slots` keys (room for a multiple of LANES), not scaled yet -> `weights` e^(score - largest): the
// first `seen` are seen, `bias` is added to them unless it is null.
template <class T, class Weight>
Share weigh(float *scores, float scale, const T *bias, int64_t seen, int64_t slots, Weight *weights) {
    const int64_t some = std::clamp<int64_t>(seen, 0, slots), whole = some / LANES * LANES;
    Floats most = Floats{} - 1e30f, total = {};  // finite, so that no -inf is taken from -inf
    for (int64_t s = 0; s < whole; s += LANES) {
        Floats score = load(scores + s) * scale;
        if (bias) score += load(bias + s);
        store(score, scores + s);
        most = larger(most, score);
    }
    if (whole < some) {
        for (int64_t s = whole; s < whole + LANES; s++)
            scores[s] = s < some ? scores[s] * scale + (bias ? to_float(bias[s]) : 0.0f) : -INFINITY;
        most = larger(most, load(scores + whole));
    }
    const float largest = reduce(most, [](Floats a, Floats b) { return larger(a, b); });
    for (int64_t s = 0; s < slots; s += LANES) {
        const Floats weight = s < some ? exp_negative(load(scores + s) - largest) : Floats{};
        store(weight, weights + s);
        total += weight;
    }
    return {largest, sum_of(total)};
}

// The products of N queries with sixteen keys; beyond the last key, the last again.
template <class T, int D, int N>
struct PlainQueries {
    Floats values[N][D / LANES];

    explicit PlainQueries(const T *const *queries) {
        for (int n = 0; n < N; n++)
            for (int v = 0; v < D / LANES; v++) values[n][v] = load(queries[n] + v * LANES);
    }
    void times(const T *keys, int64_t count, Floats (*products)[LANES]) const {
        for (int i = 0; i < LANES; i++) {
            const T *key = keys + std::min<int64_t>(i, count - 1) * D;
            for (int n = 0; n < N; n++) products[n][i] = Floats{};
            for (int v = 0; v < D / LANES; v++) {
                const Floats part = load(key + v * LANES);
                for (int n = 0; n < N; n++) products[n][i] += values[n][v] * part;
            }
        }
    }
};

#ifdef __AVX512BF16__
template <int D, int N>
struct PairedQueries {  // in bf16, two products a lane at once
    __m512bh values[N][D / 32];

    explicit PairedQueries(const bf16 *const *queries) {
        for (int n = 0; n < N; n++) std::memcpy(values[n], queries[n], D * sizeof(bf16));
    }
    void times(const bf16 *keys, int64_t count, Floats (*products)[LANES]) const {
        for (int i = 0; i < LANES; i++) {
            const bf16 *key = keys + std::min<int64_t>(i, count - 1) * D;
            __m512 sums[N] = {};
            for (int v = 0; v < D / 32; v++) {
                const __m512bh part = (__m512bh)_mm512_loadu_si512(key + v * 32);
                for (int n = 0; n < N; n++) sums[n] = _mm512_dpbf16_ps(sums[n], values[n][v], part);
            }
            for (int n = 0; n < N; n++) products[n][i] = (Floats)sums[n];
        }
    }
};
template <class T, int D, int N>
using Queries = std::conditional_t<std::is_same_v<T, bf16> && D % 32 == 0, PairedQueries<D, N>, PlainQueries<T, D, N>>;
#else
template <class T, int D, int N>
using Queries = PlainQueries<T, D, N>;
#endif

// Two vectors of values that follow each other in memory, as they are the fastest to load, and back in their order.
inline void load_two(const float *from, Floats &one, Floats &other) { one = load(from), other = load(from + LANES); }
inline void load_two(const bf16 *from, Floats &even, Floats &odd) {
    Words both;
    std::memcpy(&both, from, sizeof(both));
    even = (Floats)(both << 16), odd = (Floats)(both & 0xffff0000u);
}
inline void in_order(const float *, Floats &, Floats &) {}
inline void in_order(const bf16 *, Floats &even, Floats &odd) {
    const Ints low = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    const Floats first = __builtin_shuffle(even, odd, low);
    odd = __builtin_shuffle(even, odd, low + 8), even = first;
}

// Sums of values [slots, D], each slot's with N weights, to `out` [N, D].
template <class T, int D, int N>
void add_values(const T *values, const float (*weights)[CHUNK], int64_t slots, float *out) {
    constexpr int V = (D + 31) / 32;
    Floats sums[N][V][2] = {};
    for (int64_t s = 0; s < slots; s++)
        for (int v = 0; v < V; v++) {
            Floats one, other = {};
            if constexpr (D % 32 == 0)
                load_two(values + s * D + v * 32, one, other);
            else
                one = load(values + s * D);
            for (int n = 0; n < N; n++) sums[n][v][0] += weights[n][s] * one, sums[n][v][1] += weights[n][s] * other;
        }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) {
            if constexpr (D % 32 == 0) {
                in_order(values, sums[n][v][0], sums[n][v][1]);
                store(sums[n][v][1], out + n * D + v * 32 + LANES);
            }
            store(sums[n][v][0], out + n * D + v * 32);
        }
}

// What will be read soon, while something else is computed; it may lie beyond the end.
template <class T>
void fetch(const T *from, int64_t count) {
    for (int64_t byte = 0; byte < count * int64_t(sizeof(T)); byte += 64) __builtin_prefetch((const char *)from + byte, 0, 2);
}

// N queries of D values each over `slots` keys and values [slots, D]; `bias[n]`: added to the scores of query n, or null.
// A query's `seen[n]` first slots are seen. Weighted sums go to `out` [N, D].
template <class T, int D, int N>
void attend_chunk(const T *const *queries, float scale, const T *keys, const T *values, const T *const *bias, const int64_t *seen,
                  int64_t slots, Share *share, float *out) {
    alignas(64) float weights[N][CHUNK];
    const Queries<T, D, N> given(queries);
    for (int64_t s = 0; s < slots; s += LANES) {
        Floats products[N][LANES];
        fetch(keys + (s + 2 * LANES) * D, LANES * D);
        fetch(values + s * D, LANES * D);
        given.times(keys + s * D, slots - s, products);
        for (int n = 0; n < N; n++) store(sums_of<LANES>(products[n]), weights[n] + s);
    }
    for (int n = 0; n < N; n++) share[n] = weigh(weights[n], scale, bias[n], seen[n], slots, weights[n]);
    add_values<T, D, N>(values, weights, slots, out);
}

// Which of a key head's queries: its row, and which of the query heads that share the key head.
struct Query {
    int64_t row, group;
};

// `rows` new rows (queries [batch, rows, key_heads * groups, D]) over a cache [batch, key_heads, slots, D]. Strides are in
// values. The `count` queries of a key head: number n is row n % rows of its query head n / rows.
template <class T>
struct Attention {
    const T *queries, *keys, *values;
    const T *bias;        // [batch or 1, 1, rows, slots]; null: each new row sees the slots up to its own
    const int64_t *ends;  // slots of each batch row that are in use; the new rows are the last ones
    T *out;               // [batch, rows, key_heads * groups, D]
    int64_t batch, rows, key_heads, groups, query_batch, query_row, key_batch, key_head, bias_batch, bias_row;
    float scale;

    int64_t count() const { return rows * groups; }
    template <int D>
    const T *query(int64_t b, int64_t head, Query at) const {
        return queries + b * query_batch + at.row * query_row + (head * groups + at.group) * D;
    }
    Query after(Query at) const { return at.row + 1 < rows ? Query{at.row + 1, at.group} : Query{0, at.group + 1}; }
    const T *bias_of(int64_t b, Query at, int64_t first) const {
        return bias ? bias + b * bias_batch + at.row * bias_row + first : nullptr;
    }
    // Of the `slots` from `first` on, how many a query sees at most.
    int64_t seen(int64_t b, Query at, int64_t first, int64_t slots) const {
        return bias ? slots : ends[b] - rows + at.row + 1 - first;
    }
    // A batch row's slots are taken in parts of this size, at most what its way to attend says: its own length alone decides.
    template <class Way>
    int64_t part(int64_t b) const {
        const int64_t most = Way::most(ends[b]), parts = (ends[b] + most - 1) / most;
        return ((ends[b] + parts - 1) / parts + LANES - 1) / LANES * LANES;
    }
    template <class Way>
    int64_t parts() const {  // of the row that has the most
        int64_t found = 0;
        for (int64_t b = 0; b < batch; b++) found = std::max(found, (ends[b] + part<Way>(b) - 1) / part<Way>(b));
        return found;
    }
};

// All queries of a key head over a part of its slots, four by four.
template <class T, int D>
struct ByVectors {
    static int64_t most(int64_t) { return CHUNK; }
    static void run(const Attention<T> &a, int64_t b, int64_t head, int64_t first, int64_t slots, Share *shares, float *sums) {
        const int64_t at = b * a.key_batch + head * a.key_head + first * D;
        Query query = {0, 0};
        for (int64_t start = 0; start < a.count(); start += 4) {
            const int64_t some = std::min<int64_t>(a.count() - start, 4);
            const T *queries[4], *bias[4];
            int64_t seen[4];
            for (int64_t i = 0; i < some; i++, query = a.after(query)) {
                queries[i] = a.template query<D>(b, head, query);
                bias[i] = a.bias_of(b, query, first);
                seen[i] = a.seen(b, query, first, slots);
            }
            auto *kernel = some == 1   ? attend_chunk<T, D, 1>
                           : some == 2 ? attend_chunk<T, D, 2>
                           : some == 3 ? attend_chunk<T, D, 3>
                                       : attend_chunk<T, D, 4>;
            kernel(queries, a.scale, a.keys + at, a.values + at, bias, seen, slots, shares + start, sums + start * D);
        }
    }
};

// What the threads of a team hand each other.
struct Between {
    std::vector<float> sums;
    std::vector<Share> shares;
    std::unique_ptr<void, decltype(&std::free)> laid{nullptr, std::free};  // aligned for the largest vectors
    size_t laid_bytes = 0;

    void fit_laid(size_t bytes) {
        if (laid_bytes >= bytes) return;
        laid.reset(), laid.reset(std::aligned_alloc(64, bytes)), laid_bytes = bytes;
    }

    template <class Way, class T>
    void fit(const Attention<T> &a, int64_t width) {
        const int64_t all = a.batch * a.key_heads * a.template parts<Way>() * a.count();
        if (int64_t(shares.size()) < all) shares.resize(all);
        if (int64_t(sums.size()) < all * width) sums.resize(all * width);
    }
};

// Called by all threads of a team.
template <class Way, class T, int D>
void attend_in_team(const Attention<T> &a, Between &between) {
    const int64_t count = a.count(), parts = a.template parts<Way>(), tasks = a.batch * a.key_heads * parts;
    float *sums = between.sums.data();
    Share *shares = between.shares.data();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t head = task / parts % a.key_heads, b = task / parts / a.key_heads, part = a.template part<Way>(b);
        const int64_t first = task % parts * part, slots = std::min(a.ends[b] - first, part);
        if (slots > 0) Way::run(a, b, head, first, slots, shares + task * count, sums + task * count * D);
    }
#pragma omp for schedule(static)
    for (int64_t query_head = 0; query_head < a.batch * a.key_heads * a.groups; query_head++) {
        const int64_t group = query_head % a.groups, all = query_head / a.groups, b = all / a.key_heads, task = all * parts;
        const int64_t part = a.template part<Way>(b), used = (a.ends[b] + part - 1) / part;
        for (int64_t row = 0; row < a.rows; row++) {
            const int64_t n = group * a.rows + row;
            float largest = -1e30f, total = 0;
            Floats sum[D / LANES] = {};
            for (int64_t c = 0; c < used; c++) largest = std::max(largest, shares[(task + c) * count + n].largest);
            for (int64_t c = 0; c < used; c++) {
                const Share &share = shares[(task + c) * count + n];
                const float weight = std::exp(share.largest - largest);
                total += weight * share.total;
                const float *from = sums + ((task + c) * count + n) * D;
                for (int v = 0; v < D / LANES; v++) sum[v] += weight * load(from + v * LANES);
            }
            T *to = a.out + ((b * a.rows + row) * a.key_heads * a.groups + all % a.key_heads * a.groups + group) * D;
            for (int v = 0; v < D / LANES; v++) store(sum[v] / total, to + v * LANES);
        }
    }
}

template <class T>
auto by_vectors(int64_t width) {
    return width == 16   ? attend_in_team<ByVectors<T, 16>, T, 16>
           : width == 32 ? attend_in_team<ByVectors<T, 32>, T, 32>
           : width == 64 ? attend_in_team<ByVectors<T, 64>, T, 64>
           : width == 96 ? attend_in_team<ByVectors<T, 96>, T, 96>
                         : attend_in_team<ByVectors<T, 128>, T, 128>;
}

}  // namespace
