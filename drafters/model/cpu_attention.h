// Attention of a few new rows over a cache, each batch row over its own slots alone.

#pragma once

#include <vector>

#include "cpu_vectors.h"

namespace {

constexpr int64_t CHUNK = 256;  // cache slots that one thread takes at once: their keys and values fit its L2 cache

// One chunk's share of a query's attention: the sum of e^(score - largest) values, of the weights, and the largest.
struct Share {
    float largest, total;
};

// A query's scores over `slots` keys (room for a multiple of LANES) -> weights e^(score - largest): the first `seen` are seen,
// `bias` is added to them unless it is null.
template <class T>
Share weigh(float *scores, const T *bias, int64_t seen, int64_t slots) {
    const int64_t padded = (slots + LANES - 1) / LANES * LANES, some = std::clamp<int64_t>(seen, 0, slots);
    for (int64_t s = some; s < padded; s++) scores[s] = -INFINITY;
    if (bias)
        for (int64_t s = 0; s < some; s++) scores[s] += to_float(bias[s]);
    Floats most = Floats{} - 1e30f, total = {};  // finite, so that no -inf is taken from -inf
    for (int64_t s = 0; s < padded; s += LANES) most = larger(most, load(scores + s));
    const float largest = reduce(most, [](float a, float b) { return std::max(a, b); });
    for (int64_t s = 0; s < padded; s += LANES) {
        const Floats weight = exp_negative(load(scores + s) - largest);
        store(weight, scores + s);
        total += weight;
    }
    return {largest, reduce(total, [](float a, float b) { return a + b; })};
}

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
    for (int n = 0; n < N; n++) share[n] = weigh(weights[n], bias[n], seen[n], slots);
    Floats sums[N][V] = {};
    for (int64_t s = 0; s < slots; s++)
        for (int v = 0; v < V; v++) {
            const Floats part = load(values + s * D + v * LANES);
            for (int n = 0; n < N; n++) sums[n][v] += weights[n][s] * part;
        }
    for (int n = 0; n < N; n++)
        for (int v = 0; v < V; v++) store(sums[n][v], out + n * D + v * LANES);
}

// `rows` new rows (queries [batch, rows, key_heads * groups, D]) over a cache [batch, key_heads, slots, D]. Strides are in
// values. The `count` queries of a key head: number n is row n % rows of its query head n / rows.
template <class T>
struct Attention {
    const T *queries, *keys, *values;
    const T *bias;        // [batch or 1, 1, rows, slots]; null: each new row sees the slots up to its own
    const int64_t *ends;  // slots of each batch row that are in use, of which the new rows are the last
    T *out;               // [batch, rows, key_heads * groups, D]
    int64_t batch, rows, key_heads, groups, query_batch, query_row, key_batch, key_head, bias_batch, bias_row;
    float scale;

    int64_t count() const { return rows * groups; }
    template <int D>
    const T *query(int64_t b, int64_t head, int64_t n) const {
        return queries + b * query_batch + n % rows * query_row + (head * groups + n / rows) * D;
    }
    const T *bias_of(int64_t b, int64_t n, int64_t first) const {
        return bias ? bias + b * bias_batch + n % rows * bias_row + first : nullptr;
    }
    // Of the `slots` from `first` on, how many a query sees at most.
    int64_t seen(int64_t b, int64_t n, int64_t first, int64_t slots) const {
        return bias ? slots : ends[b] - rows + n % rows + 1 - first;
    }
    // A batch row's slots are taken in parts of this size, at most `most`: its own length alone decides.
    int64_t part(int64_t b, int64_t most) const {
        const int64_t parts = (ends[b] + most - 1) / most;
        return ((ends[b] + parts - 1) / parts + LANES - 1) / LANES * LANES;
    }
    int64_t parts(int64_t most) const {  // of the row that has the most
        int64_t found = 0;
        for (int64_t b = 0; b < batch; b++) found = std::max(found, (ends[b] + part(b, most) - 1) / part(b, most));
        return found;
    }
};

// All queries of a key head over a part of its slots, four by four.
template <class T, int D>
struct ByVectors {
    static constexpr int64_t MOST = CHUNK;
    static void run(const Attention<T> &a, int64_t b, int64_t head, int64_t first, int64_t slots, Share *shares, float *sums) {
        const int64_t at = b * a.key_batch + head * a.key_head + first * D;
        for (int64_t start = 0; start < a.count(); start += 4) {
            const int64_t some = std::min<int64_t>(a.count() - start, 4);
            alignas(64) float scaled[4 * D];
            const T *bias[4];
            int64_t seen[4];
            for (int64_t i = 0; i < some; i++) {
                const T *query = a.template query<D>(b, head, start + i);
                for (int d = 0; d < D; d++) scaled[i * D + d] = to_float(query[d]) * a.scale;
                bias[i] = a.bias_of(b, start + i, first);
                seen[i] = a.seen(b, start + i, first, slots);
            }
            auto *kernel = some == 1   ? attend_chunk<T, D, 1>
                           : some == 2 ? attend_chunk<T, D, 2>
                           : some == 3 ? attend_chunk<T, D, 3>
                                       : attend_chunk<T, D, 4>;
            kernel(scaled, a.keys + at, a.values + at, bias, seen, slots, shares + start, sums + start * D);
        }
    }
};

// What the threads of a team hand each other.
struct Between {
    std::vector<float> sums;
    std::vector<Share> shares;

    template <class T>
    void fit(const Attention<T> &a, int64_t width, int64_t most) {
        const int64_t all = a.batch * a.key_heads * a.parts(most) * a.count();
        if (int64_t(shares.size()) < all) shares.resize(all);
        if (int64_t(sums.size()) < all * width) sums.resize(all * width);
    }
};

// Called by all threads of a team.
template <class Way, class T, int D>
void attend_in_team(const Attention<T> &a, Between &between) {
    const int64_t count = a.count(), parts = a.parts(Way::MOST), tasks = a.batch * a.key_heads * parts;
    float *sums = between.sums.data();
    Share *shares = between.shares.data();
#pragma omp for schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        const int64_t head = task / parts % a.key_heads, b = task / parts / a.key_heads, part = a.part(b, Way::MOST);
        const int64_t first = task % parts * part, slots = std::min(a.ends[b] - first, part);
        if (slots > 0) Way::run(a, b, head, first, slots, shares + task * count, sums + task * count * D);
    }
#pragma omp for schedule(static)
    for (int64_t query = 0; query < a.batch * a.key_heads * count; query++) {
        const int64_t n = query % count, head = query / count % a.key_heads, b = query / count / a.key_heads;
        const int64_t task = (b * a.key_heads + head) * parts, part = a.part(b, Way::MOST), used = (a.ends[b] + part - 1) / part;
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
        T *to = a.out + ((b * a.rows + n % a.rows) * a.key_heads * a.groups + head * a.groups + n / a.rows) * D;
        for (int v = 0; v < D / LANES; v++) store(sum[v] / total, to + v * LANES);
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
