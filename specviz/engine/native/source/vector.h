/* Sixteen floats at a time, with sums in one fixed order whatever the processor's width. It knows nothing of models.

   The compiler is told not to fuse products and sums by itself (-ffp-contract=off), so an element's bits never depend on whether a loop's
   body or its tail computed it; where a fused product is wanted, fused() asks for it by name. */
#ifndef SPECVIZ_VECTOR_H
#define SPECVIZ_VECTOR_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")     /* or sums would live in memory */

typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef uint8_t bytes __attribute__((vector_size(16)));
typedef float floats8 __attribute__((vector_size(32)));
typedef float floats4 __attribute__((vector_size(16)));

INLINE floats load(const float *from) { floats v; memcpy(&v, from, sizeof v); return v; }
INLINE void store(float *to, floats v) { memcpy(to, &v, sizeof v); }
INLINE floats all(float x) { return (floats){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* The first `count` of sixteen, zeros behind them: never reads past the end of a row. */
INLINE floats load_part(const float *from, int count) {
    floats v = all(0.0f);
    memcpy(&v, from, (size_t)count * sizeof(float));
    return v;
}
INLINE floats load_some(const float *from, int left) { return left >= LANES ? load(from) : load_part(from, left); }
INLINE void store_some(float *to, floats v, int left) { memcpy(to, &v, (size_t)(left >= LANES ? LANES : left) * sizeof(float)); }

/* a * b + c, rounded once where the processor can. */
INLINE floats fused(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    union { floats all; __m256 half[2]; } x = {a}, y = {b}, z = {c};
    z.half[0] = _mm256_fmadd_ps(x.half[0], y.half[0], z.half[0]);
    z.half[1] = _mm256_fmadd_ps(x.half[1], y.half[1], z.half[1]);
    return z.all;
#elif defined(__ARM_NEON) && defined(__aarch64__)
    union { floats all; float32x4_t part[4]; } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 4; i++) z.part[i] = vfmaq_f32(z.part[i], x.part[i], y.part[i]);
    return z.all;
#else
    return a * b + c;
#endif
}

INLINE floats larger(floats a, floats b) {
    ints mask = a > b;
    return (floats)(((ints)a & mask) | ((ints)b & ~mask));
}

INLINE floats magnitude(floats a) { return (floats)((ints)a & 0x7fffffff); }

/* Halves added to halves: always the same tree. */
INLINE float sum_of(floats v) {
    union { floats all; floats8 half[2]; } a = {v};
    union { floats8 all; floats4 half[2]; } b = {a.half[0] + a.half[1]};
    floats4 c = b.half[0] + b.half[1];
    return (c[0] + c[2]) + (c[1] + c[3]);
}

INLINE float largest_of(floats v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}

/* e to the x, within 2 units of the last place between -87 and 88, and held to that range. The power series of e to the r, |r| <= ln 2 / 2,
   whose first term left out is below 6e-9, times a power of two put into the exponent. */
INLINE floats exponential(floats x) {
    const floats high = all(88.0f), low = all(-87.0f), magic = all(12582912.0f);     /* adding 1.5 * 2^23 rounds to whole numbers */
    ints over = x > high, under = x < low;
    x = (floats)(((ints)high & over) | ((ints)x & ~over));
    x = (floats)(((ints)low & under) | ((ints)x & ~under));
    floats shifted = x * 1.44269504f + magic;
    floats whole = shifted - magic;
    floats r = fused(whole, all(-0.693359375f), x);          /* ln 2 in two parts, the first exact in few bits */
    r = fused(whole, all(2.12194440e-4f), r);
    floats p = all(1.0f / 5040.0f);
    p = fused(p, r, all(1.0f / 720.0f));
    p = fused(p, r, all(1.0f / 120.0f));
    p = fused(p, r, all(1.0f / 24.0f));
    p = fused(p, r, all(1.0f / 6.0f));
    p = fused(p, r, all(0.5f));
    p = fused(p, r, all(1.0f));
    p = fused(p, r, all(1.0f));
    ints power = ((ints)shifted - (ints)magic) << 23;
    return (floats)((ints)p + power);
}

#endif
