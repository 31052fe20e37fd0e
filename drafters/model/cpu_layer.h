// A decoder layer for a few new rows, all of it by one team of threads: torch's operations on one row take longer to start
// than to compute, and together a third of the time in which the memory hands out the weights.

#pragma once

#include "cpu_tree_attention.h"

namespace {

struct Layer {
    Product heads, out, gate_up, down;                       // without tiles in gate_up: no MLP
    const bf16 *attention_norm, *mlp_norm;                   // [hidden]; null: none
    const bf16 *head_norm;                                   // [query_heads + key_heads, width], before RoPE; null: none
    float attention_eps, mlp_eps, head_eps, scale;
    int64_t hidden, query_heads, key_heads, width;
};

// New rows, batch row by batch row, and where they are. Strides are in values.
struct Forward {
    const bf16 *hidden;               // [batch, rows, layer.hidden]
    const bf16 *cos, *sin;            // [batch or 1, rows, width]; the sines' first half has its sign turned
    const bf16 *bias;                 // as Attention's
    const int64_t *ends;              // as Attention's
    bf16 *keys, *values;              // as Attention's; the new rows' are written
    bf16 *out;                        // as hidden
    int64_t batch, rows, angle_batch, key_batch, key_head, bias_batch, bias_row;
};

constexpr int64_t FEW = 6;  // queries of a key head that are faster by vectors than by tiles, half of which they leave empty

// RMSNorm, rounded once. -> [rows, width]
inline void norm_in_team(const bf16 *x, const bf16 *weight, float eps, bf16 *to, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *from = x + row * width;
        Floats squares = {};
        for (int64_t i = 0; i < width; i += LANES) squares += load(from + i) * load(from + i);
        const float mean = reduce(squares, [](float a, float b) { return a + b; }) / width;
        const float scale = 1.0f / std::sqrt(mean + eps);
        for (int64_t i = 0; i < width; i += LANES) store(load(from + i) * scale * load(weight + i), to + row * width + i);
    }
}

// A head's values [width]: normed if there is a weight, turned by its position's angles.
inline void turn(const bf16 *from, const bf16 *weight, float eps, const bf16 *cos, const bf16 *sin, bf16 *to, int64_t width) {
    float x[128];
    for (int64_t i = 0; i < width; i += LANES) store(load(from + i), x + i);
    if (weight) {
        float squares = 0;
        for (int64_t i = 0; i < width; i++) squares += x[i] * x[i];
        const float scale = 1.0f / std::sqrt(squares / width + eps);
        for (int64_t i = 0; i < width; i += LANES)
            store(nearest(nearest(load(x + i) * scale) * load(weight + i)), x + i);
    }
    float turned[128];
    const int64_t half = width / 2;
    for (int64_t i = 0; i < width; i++) turned[i] = x[i < half ? i + half : i - half];
    for (int64_t i = 0; i < width; i += LANES)
        store(nearest(load(x + i) * load(cos + i)) + load(turned + i) * load(sin + i), to + i);
}

// The joined heads [rows, query_heads + 2 key_heads, width] of all new rows: to `queries`, and to the cache.
inline void place_heads_in_team(const Layer &layer, const Forward &f, const bf16 *joined, bf16 *queries) {
    const int64_t width = layer.width, turned = layer.query_heads + layer.key_heads, all = turned + layer.key_heads;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < f.batch * f.rows * all; task++) {
        const int64_t head = task % all, n = task / all, b = n / f.rows, row = n % f.rows;
        const bf16 *from = joined + task * width;
        const int64_t slot = b * f.key_batch + (f.ends[b] - f.rows + row) * width;
        if (head >= turned) {
            std::memcpy(f.values + slot + (head - turned) * f.key_head, from, width * sizeof(bf16));
            continue;
        }
        bf16 *to = head < layer.query_heads ? queries + (n * layer.query_heads + head) * width
                                            : f.keys + slot + (head - layer.query_heads) * f.key_head;
        const int64_t angle = b * f.angle_batch + row * width;
        turn(from, layer.head_norm ? layer.head_norm + head * width : nullptr, layer.head_eps, f.cos + angle,
             f.sin + angle, to, width);
    }
}

// SiLU of the gates times the rest: [rows, 2 width] -> [rows, width].
inline void gate_in_team(const bf16 *both, bf16 *to, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t block = 0; block < rows * (width / 32); block++) {
        const int64_t row = block / (width / 32), first = block % (width / 32) * 32;
        for (int64_t i = first; i < first + 32; i += LANES) {
            const Floats gate = load(both + row * 2 * width + i), up = load(both + row * 2 * width + width + i);
            const Floats falling = exp_negative(gate < 0 ? gate : -gate);
            const Floats share = (gate < 0 ? falling : Floats{} + 1.0f) / (falling + 1.0f);
            store(nearest(gate * share) * up, to + row * width + i);
        }
    }
}

struct Scratch {
    std::vector<bf16> normed, joined, queries, attended, middle, gate_up, gated;
    Between between;

    static bf16 *of(std::vector<bf16> &values, int64_t size) {
        if (int64_t(values.size()) < size) values.resize(size);
        return values.data();
    }
};

inline void run_layer(const Layer &layer, const Forward &f, int threads) {
    static thread_local Scratch scratch;
    const int64_t n = f.batch * f.rows, heads = layer.query_heads * layer.width;
    const bool mlp = layer.gate_up.tiles != nullptr;
    bf16 *normed = Scratch::of(scratch.normed, n * layer.hidden);
    bf16 *joined = Scratch::of(scratch.joined, n * layer.heads.outputs);
    bf16 *queries = Scratch::of(scratch.queries, n * heads);
    bf16 *attended = Scratch::of(scratch.attended, n * heads);
    bf16 *middle = mlp ? Scratch::of(scratch.middle, n * layer.hidden) : f.out;
    bf16 *gate_up = Scratch::of(scratch.gate_up, n * layer.gate_up.outputs);
    bf16 *gated = Scratch::of(scratch.gated, n * layer.down.inputs);
    const Attention<bf16> attention = {
        queries,         f.keys,  f.values,    f.bias,     f.ends,       attended,   f.batch,     f.rows, layer.key_heads,
        layer.query_heads / layer.key_heads, f.rows * heads, heads, f.key_batch, f.key_head, f.bias_batch, f.bias_row, layer.scale};
    const bool few = attention.count() <= FEW;
    Between &between = scratch.between;
    between.fit(attention, layer.width, few ? ByVectors<bf16, 32>::MOST : ByTiles<32>::MOST);
    auto *attend = few ? by_vectors<bf16>(layer.width) : by_tiles(layer.width);
#pragma omp parallel num_threads(threads)
    {
        if (layer.attention_norm)
            norm_in_team(f.hidden, layer.attention_norm, layer.attention_eps, normed, n, layer.hidden);
        multiply_in_team(layer.heads, layer.attention_norm ? normed : f.hidden, nullptr, joined, n);
        place_heads_in_team(layer, f, joined, queries);
        attend(attention, between);
        multiply_in_team(layer.out, attended, f.hidden, middle, n);
        if (mlp) {
            norm_in_team(middle, layer.mlp_norm, layer.mlp_eps, normed, n, layer.hidden);
            multiply_in_team(layer.gate_up, normed, nullptr, gate_up, n);
            gate_in_team(gate_up, gated, n, layer.down.inputs);
            multiply_in_team(layer.down, gated, middle, f.out, n);
        }
    }
}

}  // namespace
