// One pass of an EAGLE head over a few nodes of one sequence's draft: what goes in, its decoder layer, the LM head's rows
// that drafting takes, and the likeliest of them. torch's operations take twice the time.

#pragma once

#include "layer.h"

namespace {

struct Head {
    const Layer *layer;
    Product fc, lm_head;     // [hidden, 2 hidden]; [tokens to draft with, hidden]
    const bf16 *embeddings;  // [vocabulary, hidden]
};

// New rows; the cache holds `committed` ones and `before` others of this draft. Sizes are in values.
struct Pass {
    const bf16 *features;                        // each new row's is row `parents` of them
    const int64_t *parents, *tokens, *positions; // [rows]
    const bf16 *cos, *sin;                       // [every position, width], as Forward's
    const uint8_t *see;                          // [rows, before + rows]; null: a chain
    bf16 *keys, *values;                         // [key_heads, slots, width]
    bf16 *out;                                   // [rows, hidden], the features predicted there
    float *probabilities;                        // [judged, ranks], falling
    int64_t *places;                             // the same, of whom
    int64_t rows, committed, before, key_head, judged, ranks;  // judged: the last rows, for which tokens are wanted
};

// The `ranks` likeliest of x [width], the first of equals first, with their share of all.
inline void likeliest(const bf16 *x, int64_t width, int64_t ranks, float *probabilities, int64_t *places) {
    const int64_t whole = width / LANES * LANES;
    int64_t held = 0;
    const auto meet = [&](float value, int64_t place) {
        if (held == ranks && !(value > probabilities[held - 1])) return;
        int64_t at = held < ranks ? held++ : held - 1;
        for (; at > 0 && value > probabilities[at - 1]; at--)
            probabilities[at] = probabilities[at - 1], places[at] = places[at - 1];
        probabilities[at] = value, places[at] = place;
    };
    for (int64_t i = 0; i < whole; i += LANES) {
        const Floats some = load(x + i);
        bool any = held < ranks;
        if (!any) {
            const Ints above = some > probabilities[held - 1];
            for (int lane = 0; lane < LANES; lane++) any |= above[lane] != 0;
        }
        if (any)
            for (int lane = 0; lane < LANES; lane++) meet(some[lane], i + lane);
    }
    for (int64_t i = whole; i < width; i++) meet(to_float(x[i]), i);
    const float most = probabilities[0];
    Floats sums = {};
    for (int64_t i = 0; i < whole; i += LANES) sums += exp_negative(load(x + i) - most);
    float total = sum_of(sums);
    for (int64_t i = whole; i < width; i++) total += std::exp(to_float(x[i]) - most);
    for (int64_t rank = 0; rank < held; rank++) probabilities[rank] = std::exp(probabilities[rank] - most) / total;
}

inline void run_pass(const Head &head, const Pass &pass, int threads) {
    static thread_local std::vector<bf16> given, hidden, angles, bias, logits;
    const Layer &layer = *head.layer;
    const int64_t rows = pass.rows, size = layer.hidden, width = layer.width, slots = pass.committed + pass.before + rows;
    bf16 *in = Scratch::of(given, 2 * rows * size), *cos = Scratch::of(angles, 2 * rows * width), *sin = cos + rows * width;
    for (int64_t row = 0; row < rows; row++) {
        std::memcpy(in + 2 * row * size, head.embeddings + pass.tokens[row] * size, size * sizeof(bf16));
        std::memcpy(in + (2 * row + 1) * size, pass.features + pass.parents[row] * size, size * sizeof(bf16));
        std::memcpy(cos + row * width, pass.cos + pass.positions[row] * width, width * sizeof(bf16));
        std::memcpy(sin + row * width, pass.sin + pass.positions[row] * width, width * sizeof(bf16));
    }
    bf16 *hides = nullptr;
    if (pass.see) {
        hides = Scratch::of(bias, rows * slots + 2 * LANES);
        std::memset(hides, 0, rows * slots * sizeof(bf16));
        for (int64_t row = 0; row < rows; row++)
            for (int64_t other = 0; other < pass.before + rows; other++)
                if (!pass.see[row * (pass.before + rows) + other]) hides[row * slots + pass.committed + other].bits = 0xff80;
    }
    const bf16 *entered = Scratch::of(hidden, rows * size);
#pragma omp parallel num_threads(threads)
    multiply_in_team(head.fc, by_rows((const bf16 *)in, 2 * size), {}, by_rows((bf16 *)entered, size), rows);
    const int64_t key_batch = layer.key_heads * pass.key_head;
    const Forward forward = {entered, cos, sin, hides, &slots, pass.keys, pass.values, pass.out, 1,
                             rows, 0, key_batch, pass.key_head, 0, slots};
    const Layer *only = &layer;
    run_layers(&only, 1, forward, 0, threads);
    const bf16 *judged = pass.out + (rows - pass.judged) * size;
    const int64_t wide = head.lm_head.outputs;
    bf16 *found = Scratch::of(logits, pass.judged * wide);
#pragma omp parallel num_threads(threads)
    multiply_in_team(head.lm_head, by_rows(judged, size), {}, by_rows(found, wide), pass.judged);
    for (int64_t row = 0; row < pass.judged; row++)
        likeliest(found + row * wide, wide, pass.ranks, pass.probabilities + row * pass.ranks, pass.places + row * pass.ranks);
}

}  // namespace
