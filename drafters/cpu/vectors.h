// Sixteen values at once, in float32 and bf16, in the registers of the machine.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

// Sixteen values, in the registers of the machine (an extension of GCC and clang).
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
#ifdef __AVX512BF16__
    const __m256bh rounded = _mm512_cvtneps_pbh((__m512)values);
#else
    const Words bits = (Words)values;
    const Halves rounded = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, Halves);
#endif
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

// The lanes combined, by halves: what two vectors are combined by must not care for their order.
template <int COUNT = LANES, class Combine>
inline float reduce(Floats values, Combine combine) {
    if constexpr (COUNT == 1) {
        return values[0];
    } else {
        Ints other;
        for (int lane = 0; lane < LANES; lane++) other[lane] = lane ^ COUNT / 2;
        return reduce<COUNT / 2>(combine(values, __builtin_shuffle(values, other)), combine);
    }
}
inline float sum_of(Floats values) {
    return reduce(values, [](Floats a, Floats b) { return a + b; });
}

}  // namespace
