// Operations that torch's CPU kernels are slow at when few rows are decoded; kernels.py compiles and calls this.
// Plain C interface, loops that the compiler vectorises, torch's own OpenMP threads.

#include "attention.h"

namespace {

template <class T>
void attend(const Attention<T> &attention, int64_t width, int threads) {
    static thread_local Between between;
    Between &shared = between;  // the calling thread's
    shared.template fit<ByVectors<T, 32>>(attention, width);
    auto *kernel = by_vectors<T>(width);
#pragma omp parallel num_threads(threads)
    kernel(attention, shared);
}

// The first of the largest of x [rows, width]; the first NaN where there is one, as torch has it.
template <class T>
void largest(const T *x, int64_t rows, int64_t width, int64_t *to, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows > 2)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = x + row * width;
        const int64_t whole = width / LANES * LANES;
        Floats most = Floats{} - INFINITY;
        Ints odd = {};
        for (int64_t i = 0; i < whole; i += LANES) {
            const Floats some = load(from + i);
            most = larger(most, some);
            odd |= some != some;
        }
        float best = reduce(most, [](Floats a, Floats b) { return larger(a, b); });
        bool nan = false;
        for (int lane = 0; lane < LANES; lane++) nan |= odd[lane] != 0;
        for (int64_t i = whole; i < width; i++) best = std::max(best, to_float(from[i])), nan |= std::isnan(to_float(from[i]));
        int64_t at = 0;
        if (!nan)
            for (bool found = false; at < whole && !found;) {  // which sixteen, then which of them
                const Ints same = load(from + at) == best;
                for (int lane = 0; lane < LANES; lane++) found |= same[lane] != 0;
                if (!found) at += LANES;
            }
        while (nan ? !std::isnan(to_float(from[at])) : to_float(from[at]) != best) at++;
        to[row] = at;
    }
}

}  // namespace

#define FOR_DTYPE(name, T)                                                                                              \
    extern "C" void largest_##name(const T *x, int64_t rows, int64_t width, int64_t *to, int threads) {                 \
        largest(x, rows, width, to, threads);                                                                           \
    }                                                                                                                   \
    extern "C" void attend_##name(const Attention<T> *given, int64_t width, int threads) { attend(*given, width, threads); }
FOR_DTYPE(float32, float)
FOR_DTYPE(bfloat16, bf16)

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__FMA__)
#include <sys/syscall.h>
#include <unistd.h>

#include "pass.h"

// Whether the system lets this process use the matrix unit that this is compiled for; without one, vectors do.
extern "C" int products_allowed() {
#ifdef __AMX_BF16__
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return 1;
#endif
}

// x [rows, inputs] -> out [rows, outputs], in bf16.
extern "C" void multiply(const Product *product, const bf16 *x, bf16 *out, int64_t rows, int threads) {
#pragma omp parallel num_threads(threads)
    multiply_in_team(*product, by_rows(x, product->inputs), {}, by_rows(out, product->outputs), rows);
}

// New rows through layers of one shape.
extern "C" void layers(const Layer *const *layers, int64_t count, const Forward *first, int64_t step, int threads) {
    run_layers(layers, count, *first, step, threads);
}

// One pass of an EAGLE head.
extern "C" void pass_over(const Head *head, const Pass *pass, int threads) { run_pass(*head, *pass, threads); }
#endif
