// Decoder layers for a few new rows, all of them by one team of threads: torch's operations on one row take longer to start
// than to compute, and together a third of the time in which the memory hands out the weights.

#pragma once

#include "tree_attention.h"

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

constexpr int64_t FEW = 4;  // up to this many queries of a key head, vectors are faster than half-empty tiles

// RMSNorm, rounded once. -> [rows, width]
inline void norm_in_team(Columns<const bf16> x, const bf16 *weight, float eps, Columns<bf16> to, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        Floats squares[2] = {};
        for (int64_t block = 0; block < width / 32; block++)
            for (int half = 0; half < 2; half++) {
                const Floats some = load(x.at(row, block) + LANES * half);
                squares[half] += some * some;
            }
        const float mean = sum_of(squares[0] + squares[1]) / width;
        const float scale = 1.0f / std::sqrt(mean + eps);
        for (int64_t i = 0; i < width; i += LANES) {
            const int64_t block = i / 32, half = i % 32;
            store(load(x.at(row, block) + half) * scale * load(weight + i), to.at(row, block) + half);
        }
    }
}

// A head's values [width]: normed if there is a weight, turned by its position's angles.
inline void turn(float *x, const bf16 *weight, float eps, const bf16 *cos, const bf16 *sin, bf16 *to, int64_t width) {
    if (weight) {
        Floats squares = {};
        for (int64_t i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
        const float scale = 1.0f / std::sqrt(sum_of(squares) / width + eps);
        for (int64_t i = 0; i < width; i += LANES)
            store(nearest(nearest(load(x + i) * scale) * load(weight + i)), x + i);
    }
    const int64_t half = width / 2;
    for (int64_t i = 0; i < width; i += LANES)
        store(nearest(load(x + i) * load(cos + i)) + load(x + (i < half ? i + half : i - half)) * load(sin + i), to + i);
}

// The joined heads [rows, query_heads + 2 key_heads, width] of all new rows: to `queries`, and to the cache.
inline void place_heads_in_team(const Layer &layer, const Forward &f, Columns<const bf16> joined, bf16 *queries) {
    const int64_t width = layer.width, turned = layer.query_heads + layer.key_heads, all = turned + layer.key_heads;
#pragma omp for schedule(static)
    for (int64_t task = 0; task < f.batch * f.rows * all; task++) {
        const int64_t head = task % all, n = task / all, b = n / f.rows, row = n % f.rows;
        const int64_t slot = b * f.key_batch + (f.ends[b] - f.rows + row) * width;
        float x[128];
        for (int64_t i = 0; i < width; i += LANES) store(load(joined.at(n, (head * width + i) / 32) + i % 32), x + i);
        if (head >= turned) {
            bf16 *to = f.values + slot + (head - turned) * f.key_head;
            for (int64_t i = 0; i < width; i += LANES) store(load(x + i), to + i);
            continue;
        }
        bf16 *to = head < layer.query_heads ? queries + (n * layer.query_heads + head) * width
                                            : f.keys + slot + (head - layer.query_heads) * f.key_head;
        const int64_t angle = b * f.angle_batch + row * width;
        turn(x, layer.head_norm ? layer.head_norm + head * width : nullptr, layer.head_eps, f.cos + angle, f.sin + angle, to,
             width);
    }
}

// SiLU of the gates times the rest: [rows, 2 width] -> [rows, width], in blocks of columns.
inline void gate_in_team(const bf16 *both, bf16 *to, int64_t rows, int64_t width) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < rows * width; i += LANES) {
        const Floats gate = load(both + i), up = load(both + rows * width + i);
        const Floats falling = exp_negative(gate < 0 ? gate : -gate);
        const Floats below = falling + 1.0f, guess = (Floats)_mm512_rcp14_ps((__m512)below);
        const Floats share = (gate < 0 ? falling : Floats{} + 1.0f) * (guess * (2.0f - below * guess));
        store(nearest(gate * share) * up, to + i);
    }
}

struct Scratch {
    std::vector<bf16> normed, joined, queries, attended, middle, gate_up, gated, between_layers;
    Between between;

    static bf16 *of(std::vector<bf16> &values, int64_t size) {
        if (int64_t(values.size()) < size) values.resize(size);
        return values.data();
    }
};

// `count` layers of one shape, one after the other. `f` is of the first; the keys and values of each further one lie `step`
// values on.
inline void run_layers(const Layer *const *layers, int64_t count, const Forward &f, int64_t step, int threads) {
    static thread_local Scratch scratch;
    const Layer &shape = *layers[0];
    const int64_t n = f.batch * f.rows, heads = shape.query_heads * shape.width, inner = shape.down.inputs;
    const bool mlp = shape.gate_up.tiles != nullptr;
    const Columns<bf16> normed = by_blocks(Scratch::of(scratch.normed, n * shape.hidden), n);
    const Columns<bf16> joined = by_blocks(Scratch::of(scratch.joined, n * shape.heads.outputs), n);
    bf16 *queries = Scratch::of(scratch.queries, n * heads);
    bf16 *attended = Scratch::of(scratch.attended, n * heads);
    bf16 *middles = mlp ? Scratch::of(scratch.middle, n * shape.hidden) : nullptr;
    const Columns<bf16> gate_up = by_blocks(Scratch::of(scratch.gate_up, n * shape.gate_up.outputs), n);
    const Columns<bf16> gated = by_blocks(Scratch::of(scratch.gated, n * inner), n);
    bf16 *other = count > 1 ? Scratch::of(scratch.between_layers, n * shape.hidden) : nullptr;
    Attention<bf16> attention = {
        queries,         f.keys,  f.values,    f.bias,     f.ends,       attended,   f.batch,     f.rows, shape.key_heads,
        shape.query_heads / shape.key_heads, f.rows * heads, heads, f.key_batch, f.key_head, f.bias_batch, f.bias_row, shape.scale};
    const bool few = attention.count() <= FEW, prompt = attention.count() >= PROMPT;
    Between &between = scratch.between;
    few ? between.fit<ByVectors<bf16, 32>>(attention, shape.width) : fit_tiles(attention, shape.width, prompt, between);
    auto *attend = few ? by_vectors<bf16>(shape.width) : by_tiles(shape.width, prompt);
#pragma omp parallel num_threads(threads) firstprivate(attention)
    for (int64_t number = 0; number < count; number++) {
        const Layer &layer = *layers[number];
        // The last layer writes to f.out, those before it to the other and to f.out in turn.
        const bool last = (count - number) % 2;
        const Columns<const bf16> hidden = by_rows<const bf16>(number ? (last ? other : f.out) : f.hidden, layer.hidden);
        const Columns<bf16> out = by_rows(last ? f.out : other, layer.hidden);
        const Columns<bf16> middle = mlp ? by_blocks(middles, n) : out;
        Forward own = f;
        attention.keys = own.keys = f.keys + number * step;
        attention.values = own.values = f.values + number * step;
        attention.scale = layer.scale;
        if (layer.attention_norm) norm_in_team(hidden, layer.attention_norm, layer.attention_eps, normed, n, layer.hidden);
        multiply_in_team(layer.heads, layer.attention_norm ? Columns<const bf16>(normed) : hidden, {}, joined, n);
        place_heads_in_team(layer, own, joined, queries);
        attend(attention, between);
        multiply_in_team(layer.out, by_rows(attended, heads), hidden, middle, n);
        if (mlp) {
            norm_in_team(middle, layer.mlp_norm, layer.mlp_eps, normed, n, layer.hidden);
            multiply_in_team(layer.gate_up, normed, {}, gate_up, n);
            gate_in_team(gate_up.data, gated.data, n, inner);
            multiply_in_team(layer.down, gated, middle, out, n);
        }
    }
}

}  // namespace
